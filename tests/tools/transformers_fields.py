"""Write nanokv/costs/other/transformers_fields.json: what nanokv has to know of transformers' config classes.

    python tests/tools/transformers_fields.py          # compare, exit code 1 if they differ
    python tests/tools/transformers_fields.py --write

For each architecture of table.py: the fields that its rule reads with transformers' defaults, their other names, and
the fields that look as if they decided bytes and do not. For each multimodal architecture: where its text model is.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from nanokv.costs.other import fields as known
from nanokv.costs.other.table import ARCHITECTURES, layers_of
from nanokv.errors import ConfigError

FILE = Path(known.__file__).with_name("transformers_fields.json")
SOURCES = ("fields", "keeps", "orders", "table")
ALWAYS = ("num_hidden_layers", "max_position_embeddings", "layer_types")
# Fields of a text model inside another one.
TEXT = ("text_config", "thinker_config")


def classes() -> dict[str, type]:
    """model_type → config class, those inside others too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {}
    for name in CONFIG_MAPPING:
        try:
            todo = [CONFIG_MAPPING[name]]
        except (ImportError, AttributeError):
            continue
        while todo:
            made = todo.pop()
            if made.model_type and made.model_type not in found:
                found[made.model_type] = made
                todo += [sub for sub in made.sub_configs.values() if hasattr(sub, "sub_configs")]
    return found


def vocabulary() -> set[str]:
    """The names that a rule of keeps.py, orders.py or table.py reads."""
    text = "".join((FILE.parent / f"{name}.py").read_text("utf-8") for name in SOURCES)
    asked = re.findall(r'\.(?:get|size|names|numbers)\(\s*"(\w+)"|inner\(f, "(\w+)"\)', text)
    parameters = re.findall(r'(?:Every|Nth)\((?:\d+, |\d+, name=)"(\w+)"|Listed\("(\w+)"', text)
    return {name for pair in asked + parameters for name in pair if name}


class Recorded(dict):
    """The fields of an empty config.json: the names that were looked for."""

    def __init__(self):
        self.asked = set()

    def __contains__(self, name):
        self.asked.add(name)
        return False


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def row(architecture: str, made: type) -> dict:
    """The table's row of one config class."""
    defaults = {
        f.name: plain(f.default)
        for f in dataclasses.fields(made)
        if f.default is not dataclasses.MISSING
    }
    names: dict[str, list[str]] = {}
    for name, other in made.attribute_map.items():
        names.setdefault(name, []).append(other)
        names.setdefault(other, []).append(name)
    words = vocabulary() | set(ALWAYS)
    wanted = {name for name in words if name in defaults}
    used = {name: names[name] for name in sorted(words) if name in names}
    wanted |= {other for others in used.values() for other in others if other in defaults}
    recorded = Recorded()
    known.table()["architectures"][architecture] = {"reads": {}, "names": used, "others": []}
    known.table()["architectures"][architecture]["reads"] = {n: defaults[n] for n in wanted}
    try:
        layers_of(known.Fields(architecture, recorded))
    except ConfigError:
        pass
    asked = recorded.asked | wanted
    others = [n for n in defaults if n not in asked and known.is_suspicious(n)]
    reads = {name: defaults.get(name) for name in sorted(asked)}
    return {"reads": reads, "names": used, "others": sorted(others)}


def wrappers(made: dict[str, type]) -> dict[str, list[str]]:
    """Multimodal model_type → [field with the text model, its architecture if the field has no model_type]."""
    found = {}
    for name, outer in sorted(made.items()):
        for place in TEXT:
            if place not in outer.sub_configs:
                continue
            try:
                text = getattr(outer(), place).model_type
            except Exception:
                continue
            if text in ARCHITECTURES or text in made:
                found[name] = [place, text]
    return {name: pair for name, pair in found.items() if reaches(pair, found)}


def reaches(pair: list[str], found: dict[str, list[str]]) -> bool:
    return pair[1] in ARCHITECTURES or pair[1] in found


def made_table() -> dict:
    import transformers

    made = classes()
    missing = sorted(set(ARCHITECTURES) - set(made))
    assert not missing, f"unknown to transformers: {missing}"
    table = {
        "transformers": transformers.__version__,
        "architectures": {},
        "wrappers": wrappers(made),
    }
    known.table = lambda: table
    for architecture in sorted(ARCHITECTURES):
        table["architectures"][architecture] = row(architecture, made[architecture])
    return table


def text_of(table: dict) -> str:
    """JSON with a line per architecture."""
    lines = ["{", f'"transformers": {json.dumps(table["transformers"])},']
    for part in ("architectures", "wrappers"):
        each = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table[part].items()]
        lines += [f'"{part}": {{', ",\n".join(each), "}," if part == "architectures" else "}"]
    return "\n".join([*lines, "}"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = text_of(made_table())
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return int(FILE.read_text("utf-8") != text)


if __name__ == "__main__":
    sys.exit(main())
