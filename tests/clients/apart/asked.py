"""What every client is asked for."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

KEY: Final = "sk-of-the-clients"
MODEL: Final = "smollm2-135m-instruct"
CAPITAL: Final = "What is the capital of France?"
STORY: Final = "Tell a long story about a page table."
TOO_LONG: Final = "word " * 4000
INVENT: Final = "Invent a person."
ROOM_TOKENS: Final = 1500
"""For an answer of a form, which a small model may draw out with white space."""
WEATHER: Final = "What is the weather in Paris?"
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Closed(BaseModel):
    """Whatever else a schema allows, a small model adds without end."""

    model_config = ConfigDict(extra="forbid")


class Address(Closed):
    street: str = Field(max_length=16)
    number: int = Field(ge=1, le=999)


class Person(Closed):
    """A person and where they live."""

    name: str = Field(max_length=16)
    mood: Literal["glad", "sad"]
    addresses: list[Address] = Field(min_length=1, max_length=2)


class City(Closed):
    city: str = Field(max_length=20)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
