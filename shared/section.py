"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Width = Annotated[int, Field(ge=1, le=1 << 16)]
"""Units of a network's layer. The widest in use have some thousands; a square layer of the bound is 17 GB."""


class Section(BaseModel):
    """Base of all config sections: immutable, and a key that does not exist is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        """Pydantic takes `true` for 1, so that `num_envs: true` would be one environment."""
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None:
                kinds = {field.annotation, *get_args(field.annotation)}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name} is a number, found {str(value).lower()}")
        return data


def leaves(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path → value, of everything that is no mapping."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found
