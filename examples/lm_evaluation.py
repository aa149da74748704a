"""lm-evaluation-harness on a loaded model, with a task of one's own: which of two endings is likelier."""

from __future__ import annotations

import sys
from typing import Any

import quarrel

try:
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask
except ImportError:
    sys.exit("needs lm-evaluation-harness: pip install lm-eval")


class Quarrel(LM):
    """What the harness asks of a model, by `llm.logprobs` and `llm.generate`."""

    def __init__(self, llm: quarrel.LLM) -> None:
        super().__init__()
        self._llm = llm

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        found = []
        for context, ending in (request.args for request in requests):
            whole, start = self._llm.tokenize(context + ending), len(self._llm.tokenize(context))
            tokens = self._llm.logprobs(whole, top=1)[start - 1 :]  # of each token after those before it
            found.append((sum(t.logprob for t in tokens), all(t.token_id == t.top[0][0] for t in tokens)))
        return found

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return [sum(t.logprob for t in self._llm.logprobs(self._llm.tokenize(request.args[0]))) for request in requests]

    def generate_until(self, requests: list[Any]) -> list[str]:
        asked = [request.args for request in requests]
        return [self._llm.generate(p, max_tokens=64, temperature=0, stop=o["until"]).text for p, o in asked]


ROWS = [
    {"start": "Once upon a time there was a", "endings": [" king", " spreadsheet"], "right": 0},
    {"start": "They lived happily ever", "endings": [" taxes", " after"], "right": 1},
]
TASK = {
    "task": "endings",
    "custom_dataset": lambda **_: {"test": Dataset.from_list(ROWS)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{start}}",
    "doc_to_choice": "{{endings}}",
    "doc_to_target": "{{right}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}

with quarrel.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
    results = simple_evaluate(Quarrel(llm), tasks=[ConfigurableTask(config=TASK)], bootstrap_iters=0)
print(results["results"]["endings"])
