"""Facts of a text as JSON: whatever the model is, its answer keeps to the schema."""

from __future__ import annotations

import json
import sys

import quarrel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["person", "animal", "place"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
TEXT = "Old Marten, the miller, was seventy years of age when the river rose."

try:
    form = quarrel.Structure.json(SCHEMA)
    with quarrel.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        result = llm.generate(f"{TEXT}\nWho is told of, as JSON: ", structure=form, max_tokens=120, seed=1)
except quarrel.QuarrelError as error:
    sys.exit(str(error))
print(json.loads(result.text))
