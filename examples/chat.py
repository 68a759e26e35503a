"""Chat with a running mesh through the OpenAI client: `make serve` first, then run this file.

.venv/bin/pip install openai
.venv/bin/python examples/chat.py
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1", max_tokens: str = "512") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    print(f"You are talking to {model}; an empty line ends it.")
    while question := input("> ").strip():
        messages.append({"role": "user", "content": question})
        answer = ""
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=int(max_tokens), stream=True
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
