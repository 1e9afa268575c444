"""lm-eval's local-completions on a task that is passed in: prints what the model said to each document, as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, tokenizer, output_type, *documents = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "documents.json"
    lines.write_text("\n".join(documents), encoding="utf-8")
    task = {
        "task": "ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}},
        "test_split": "test",
        "output_type": output_type,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "perplexity" if output_type == "loglikelihood" else "bypass"}],
    }
    if output_type == "generate_until":
        task |= {"generation_kwargs": {"until": ["zz"], "max_gen_toks": 12}}
    found = simple_evaluate(
        "local-completions",
        tasks=[task],
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
print(json.dumps([sample["resps"][0][0] for sample in found["samples"]["ours"]]))
