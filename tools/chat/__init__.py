"""The bundled chat model: dialogues written by a program, training, export and evaluation."""
