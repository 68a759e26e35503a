"""Many prompts at once in one process, without a server.

.venv/bin/python examples/offline_batch.py
"""

from pagemesh import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "A page table maps",
    "In 1969, people first",
    "The three primary colours are",
]


def main() -> None:
    llm = LLM(model="smollm2-135m-instruct", max_model_len=2048)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for output in llm.generate(PROMPTS, greedy):
        print(f"{output.prompt!r} → {output.outputs[0].text!r}")

    conversation = [{"role": "user", "content": "Name three rivers."}]
    varied = SamplingParams(n=2, seed=7, temperature=0.8, max_tokens=16)
    for choice in llm.chat(conversation, varied)[0].outputs:
        print(f"choice {choice.index}: {choice.text!r}")


if __name__ == "__main__":
    main()
