# SPDX-License-Identifier: Apache-2.0
"""A model's config as the JSON that Triton hands to initialize(): the protobuf's field names, whole numbers as numbers.

protobuf's own JSON writes 64-bit numbers as strings, which handlers do not expect.
"""

from __future__ import annotations

from typing import Any


def as_json(message: Any) -> dict[str, Any]:
    """Every field of its own, set or not; messages only where they are set."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = {
                str(key): _value(field.message_type.fields_by_name["value"], value[key]) for key in value
            }
        elif isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            if field.message_type is None or message.HasField(field.name):
                result[field.name] = _value(field, value)
        else:
            result[field.name] = [_value(field, item) for item in value]
    return result


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode("latin-1") if isinstance(value, bytes) else value
