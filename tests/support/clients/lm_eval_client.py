"""lm-eval's local-completions on tasks that are passed in: prints what the model said to each document, as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, tokenizer, documents = sys.argv[1:]


def task(output_type: str, lines: Path) -> dict:
    metric = "perplexity" if output_type == "loglikelihood" else "bypass"
    found = {
        "task": output_type,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}},
        "test_split": "test",
        "output_type": output_type,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": metric}],
    }
    if output_type == "generate_until":
        found |= {"generation_kwargs": {"until": ["zz"], "max_gen_toks": 12}}
    return found


with tempfile.TemporaryDirectory() as folder:
    tasks = []
    for output_type, texts in json.loads(documents).items():
        lines = Path(folder) / f"{output_type}.json"
        pairs = [json.dumps({"question": one, "answer": other}) for one, other in texts]
        lines.write_text("\n".join(pairs), encoding="utf-8")
        tasks.append(task(output_type, lines))
    found = simple_evaluate(
        "local-completions",
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        model_args={
            "model": "tiny",
            "base_url": f"{url}/v1/completions",
            "num_concurrent": 1,
            "max_retries": 1,
            "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer,
        },
    )
samples = found["samples"]
print(json.dumps({name: [one["resps"][0][0] for one in samples[name]] for name in samples}))
