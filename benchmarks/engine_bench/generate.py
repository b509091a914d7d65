"""`python generate.py MODEL.gguf THREADS TOKENS`: greedy decode with transformers in float32, as JSON. Exit 3: not there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

RUNS = 3


def main() -> int:
    path, threads, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        import torch
        import transformers
    except ImportError:
        return 3
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    ids = torch.arange(1000, 1032).unsqueeze(0)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count,
            pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - began

    seconds(2)
    # The prompt's own time is taken off: what is left is decoding.
    rates = sorted(tokens / (seconds(tokens + 1) - seconds(1)) for _ in range(RUNS))
    print(json.dumps({"tokens_per_s": rates[len(rates) // 2], "version": transformers.__version__}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
