"""What the bodies of requests are made of: kinds of values, and a base that knows what it did not understand."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

Number = StrictFloat
"""Whole numbers too; neither texts nor true and false."""
Text = Annotated[StrictStr, Field(max_length=4 << 20)]
Ids = Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=1 << 20)]
Input = Annotated[Text, Field(min_length=1)] | Ids
"""A text, or the ids of its tokens."""


def inputs_of(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """One input or several, as a list of them."""
    one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if one else list(given)  # type: ignore[list-item, arg-type]


TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=256)]

Adapter = Annotated[StrictStr, Field(min_length=1, max_length=64)]
"""One of the model's LoRA adapters, by name."""


# Python holds False, 0.0 and 0 for equal, so a Literal would take them all.
Mirostat = Annotated[StrictInt, Field(ge=0, le=2)]


class Body(BaseModel):
    """Keeps fields that it does not know, so that they can be reported. A field that is null was not given."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, defer_build=True)  # built when first used

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None}

    def unknown(self) -> list[str]:
        """Paths of what is not understood, in nested objects too."""
        found = list(self.model_extra or {})
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                found += [f"{name}.{inner}" for inner in value.unknown()]
            elif isinstance(value, list) and value and not isinstance(value[0], int):  # of ids there may be a million
                bodies = [(i, v) for i, v in enumerate(value) if isinstance(v, Body)]
                found += [f"{name}.{i}.{inner}" for i, v in bodies for inner in v.unknown()]
        return sorted(found)
