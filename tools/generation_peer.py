"""Generates static batches with transformers, for tools/compare_generation.py; run by its Python.

    python tools/generation_peer.py DIRECTORY THREADS

Each line on stdin is JSON with prompts and the number of tokens for each; the answer is one line,
once all are complete. A batch runs until its longest answer ends, as static batching does.
"""

import importlib
import json
import sys


def main(directory: str, threads: int) -> None:
    """Answer lines until stdin ends."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, count = asked["prompts"], max(asked["counts"])
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        rows = zip(found[:, longest:].tolist(), asked["counts"], strict=True)
        print(json.dumps({"tokens": [row[:count] for row, count in rows]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
