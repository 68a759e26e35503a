"""Twenty prompts of every kind: code, scripts, emoji, numbers, one character, long, chat."""

from __future__ import annotations

from typing import Any, Final

_STORY: Final = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed the stairs, "
    "lit the lamp and wrote the weather into his book. One night the sea was so calm that "
)

TEXTS: Final[dict[str, str]] = {
    "fact": "The capital of France is",
    "short": "A",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "sql": "SELECT name, COUNT(*) FROM orders\nJOIN customers ON",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "',
    "chinese": "中国的首都是北京，它是一座",
    "japanese": "むかしむかし、あるところに、おじいさんと",
    "korean": "안녕하세요, 오늘 날씨가",
    "russian": "Однажды в студёную зимнюю пору",
    "arabic": "السلام عليكم ورحمة الله",
    "emoji": "🎉🎂 Happy birthday! 🥳 Here is a story with emoji: 🐱",
    "math": "12 + 30 = 42\n7 * 8 = 56\n9 * 9 =",
    "spaces": "a    b\t\tc\n\n\n    d",
    "repeat": "one two three one two three one two three one two",
    "long": _STORY * 5,
}

CHATS: Final[dict[str, list[dict[str, Any]]]] = {
    "greeting": [{"role": "user", "content": "Hi, who are you?"}],
    "system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "turns": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    "code": [{"role": "user", "content": "Write a Python function that reverses a string."}],
}
