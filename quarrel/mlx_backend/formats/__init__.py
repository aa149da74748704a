"""Block formats: a file each, with its planes, how raw blocks are split into them, and the Metal that decodes them."""
