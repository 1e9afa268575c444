"""Chat templates: byte-equal to transformers on the published Qwen3 template, and stopped when they are hostile."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import FAMILIES
from nanokv.errors import TemplateError
from nanokv.text import render_process
from nanokv.text.call_forms import fitted
from nanokv.text.template import ChatTemplate, plain
from nanokv.text.tokenizer import Tokenizer

pytestmark = pytest.mark.sampled

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "What is the weather in Zürich?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "<b>Wetter & 'Wind'</b> – 天気",
        "parameters": {
            "type": "object",
            "properties": {"ort": {"type": "string", "default": None}},
        },
    },
}
CALL = {
    "type": "function",
    "function": {"name": "wetter", "arguments": {"ort": "Zürich", "n": 1.5, "ok": True}},
}
SYSTEM = {"role": "system", "content": "Be brief. 简短"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny ☀️"}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Sunny."}, USER],
    "thinking in history": [USER, ANSWER, USER],
    "thinking last": [USER, ANSWER],
    "broken thinking": [
        USER,
        {"role": "assistant", "content": "a</think>b</think>\n\nc<think>"},
        USER,
    ],
    "reasoning_content": [
        USER,
        {"role": "assistant", "content": "x", "reasoning_content": "\nhm\n"},
    ],
    "reasoning (old name)": [USER, {"role": "assistant", "content": "x", "reasoning": "hm"}],
    "thinking (old name)": [USER, {"role": "assistant", "content": "x", "thinking": "hm"}],
    "tool call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "☀️ 21°"},
    ],
    "None and no calls": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER],
    "None and None": [USER, {"role": "assistant", "content": None, "tool_calls": None}, USER],
    "None alone": [USER, {"role": "assistant", "content": None}],
    "None with reasoning": [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        USER,
    ],
    "absent, no calls": [USER, {"role": "assistant", "tool_calls": []}, USER],
    "None of a user": [{"role": "user", "content": None}],
    "None of a tool": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": None},
        USER,
    ],
    "no content": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "ok"},
    ],
    "flat call, text arguments": [
        USER,
        {
            "role": "assistant",
            "content": "so:",
            "tool_calls": [{"name": "wetter", "arguments": '{"ort": "Bern"}'}],
        },
        {"role": "tool", "content": "x"},
        USER,
    ],
    "tool response as user": [
        USER,
        ANSWER,
        {"role": "user", "content": "<tool_response>1</tool_response>"},
    ],
    "late system": [USER, SYSTEM, USER],
    "empty": [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ],
    "html, quotes, newlines": [
        {"role": "user", "content": "<a href=\"x\">'&'</a>\r\n\t{{ 7 * 7 }}{% raw %}\n\n"}
    ],
}


@pytest.fixture(scope="session")
def qwen(qwen3_files):
    return Tokenizer.from_folder(qwen3_files / "tokenizer")


@pytest.fixture(scope="session")
def reference(qwen3_files):
    return transformers.AutoTokenizer.from_pretrained(qwen3_files / "tokenizer")


def theirs(reference, messages, **kwargs):
    return reference.apply_chat_template(messages, tokenize=False, **kwargs)


@pytest.mark.parametrize(
    "tools", [None, [], [TOOL], [TOOL, TOOL]], ids=["None", "[]", "1 tool", "2 tools"]
)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_equals_transformers(qwen, reference, messages, tools):
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        for generation in (True, False):
            kwargs = {**kwargs, "tools": tools, "add_generation_prompt": generation}
            assert qwen.render(messages, **kwargs) == theirs(reference, messages, **kwargs)


TEXT = st.text(max_size=30) | st.sampled_from(
    ["<think>", "</think>", "\n\n</think>\n\n", "<tool_response>"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.lists(TEXT, max_size=4).map("".join),
        },
        optional={"reasoning_content": TEXT, "tool_calls": st.sampled_from([None, [], [CALL]])},
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(messages=MESSAGES, generation=st.booleans())
def test_any_conversation_equals_transformers(qwen, reference, messages, generation):
    ours = qwen.render(messages, add_generation_prompt=generation)
    assert ours == theirs(reference, messages, add_generation_prompt=generation)


def test_published_ids_without_thinking(qwen):
    """From the reference figures that come with the published weights."""
    prompt = qwen.render(
        [{"role": "user", "content": "What is the capital of France?"}], enable_thinking=False
    )
    assert qwen.encode(prompt) == [
        151644,
        872,
        198,
        3838,
        374,
        279,
        6722,
        315,
        9625,
        30,
        151645,
        198,
        151644,
        77091,
        198,
        151667,
        271,
        151668,
        271,
    ]


FEATURES = {
    "loopcontrols": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macro": "{% macro f(x, n=2) %}[{{ x }}{{ n * 'ab' }}]{% endmacro %}{{ f('y') }}{{ f('z', n=0) }}",
    "call block": "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}",
    "filters": "{{ messages|map(attribute='content')|join('|')|upper|replace('WHAT', 'what') }}{{ [3, 1]|sort|first }}",
    "lazy filter is true": "{% if messages|selectattr('role', 'equalto', 'none') %}yes{% endif %}",
    "loop variables": "{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{% endfor %}",
    "loop with a test": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) ~ '.' if x is iterable else x }}{% endfor %}",
    "set block": "{% set x | trim %} {{ messages[0].role }} {% endset %}{{ x ~ 1 ~ none ~ x }}",
    "namespace and dict": "{% set n = namespace(a=1) %}{% set n.a = n.a + 41 %}{{ n.a }}{{ dict(b=[1])|tojson }}",
    "tojson": "{{ tools|tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'}|tojson(sort_keys=true) }}",
    "arithmetic": "{{ 7 // 2 }}{{ 2 ** 10 }}{{ -7 % 3 }}{{ '%s%02d' % ('a', 3) }}{{ '%05.1f'|format(2.5) }}",
    "strings": "{{ 'a,b'.split(',')[::-1] }}{{ '{}:{:>4}'.format(1, 'x') }}{{ 'ab'.center(6, '*')|indent(2, true) }}",
    "undefined": "{{ missing }}{{ messages[0].missing is defined }}{{ missing is undefined }}{{ eos_token }}",
    "items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0]|items|list|length }}",
    "in": "{{ 'a' in ['a', 'b'] }}{{ (1, 2) == (1, 2) }}{{ [1] < [2] }}{{ 'x' not in messages[0] }}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}\n\n{#- c -#}  b\n",
    "date": "{{ strftime_now('%Y') }}",
    "tests": "{{ 3 is divisibleby 3 }}{{ 'a' is in 'ab' }}{{ [1, 2]|select('odd')|list }}{{ 'odd' is test }}",
    "slices": "{{ messages[1:]|length }}{{ messages[::-1][0].role }}{{ messages[0].content[:-3] }}",
    "sum and round": "{{ [1, 2]|sum }}{{ [{'n': 1}]|sum(attribute='n') }}{{ 2.55|round(1) }}{{ 3|round(1, 'ceil') }}",
    "dicts": "{{ dict(messages[0]|items) }}{{ dict.fromkeys(['a'], 1) }}{{ dict([('a', 1)], b=2) }}",
    "letters beyond ASCII": "{% set é = 1 %}{{ é }}{{ '\\N{BULLET}' }}{{ 'é'.encode('ascii', 'namereplace') }}",
    "codecs": "{{ 'é'.encode('cp1252') }}{{ 'é'.encode('utf-16-le') }}{{ 'é'.encode('idna') }}",
    "keywords of a namespace": "{% set n = namespace(value=0, budget=1, self=2, args=3, owner=4) %}"
    "{% for m in messages %}{% set n.value = n.value + 1 %}{% endfor %}{{ n.value }}"
    "{{ n.budget }}{{ n.self }}",
    "keywords of a dict": "{{ dict(value=1, budget=2, owner=4) }}{{ '{value}{budget}'.format(value=1, budget=2) }}",
    "keywords of a macro": "{% macro tag(value, budget=2) %}<{{ value }}{{ budget }}{{ kwargs }}{{ varargs }}>"
    "{% endmacro %}{{ tag(value='x') }}{{ tag('y', budget=3, context=4, owner=5) }}"
    "{{ tag(1, 2, 3, environment=6) }}",
    "keywords of filters": "{{ 'x'|indent(width=2, first=true) }}{{ [{'a': 1}]|map(attribute='a')|list }}"
    "{{ missing|default(default_value='d', boolean=true) }}{{ [2, 1]|sort(reverse=true) }}",
    "arguments of a call block": "{% macro each(xs) %}{% for x in xs %}{{ caller(x, value=loop.index) }}{% endfor %}"
    "{% endmacro %}{% call(x, value) each(['a', 'b']) %}{{ x }}{{ value }}{% endcall %}",
    "a macro in a namespace": "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set n = namespace(f=f) %}{{ n.f('a') }}",
    "methods of texts": "{{ 'abc'.encode()|length }}{{ 'a'.translate({97: 'b'}) }}{{ 'ß'.casefold() }}"
    "{{ 'a b'.title() }}{{ ' x '.strip().rjust(3, '.') }}{{ 'a=b'.partition('=') }}",
    "methods of lists": "{{ [1, 2, 1].count(1) }}{{ [1, 2].index(2) }}{{ (1).to_bytes(2, 'big') }}{{ range(9).count(1)"
    " }}",
    "methods of dicts": "{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys()|list }}{{ {}.fromkeys([1]) }}{{ {'a': 1}.copy()"
    " }}",
    "filters that read files at first use": "{{ [1]|pprint }}{{ 'a b c'|wordwrap(3) }}"
    "{{ '<b>&amp;</b>'|striptags }}{{ lipsum(n=0) }}{{ 'www.a.org'|urlize }}"
    "{{ 'a'|attr('upper') is callable }}",
    "text in Markup": "{{ ('<a>'|safe ~ '<b>') }}{{ ('a'|safe).striptags() }}{{ '<'|escape }}{{ '<'|forceescape }}",
    "letters": r"{{ 'caf\u00e9 \x41\n' }}{{ 'ﬁ'|upper }}{{ '🧑‍🚀'[::-1] }}{{ messages[0].content|wordcount }}",
    "none and tests": "{{ none is none }}{{ messages[0].content is string }}{{ [] is sequence }}{{ {} is mapping }}"
    "{{ messages[1].content is none }}{{ 'content' in messages[1] }}{{ 1 is sameas true }}",
    "tojson in full": "{{ {'b': [1.5, none, true], 'ä': '\"'}|tojson(indent=2, separators=(',', ': '),"
    " ensure_ascii=true) }}",
    "self and blocks": "{% block a %}x{% endblock %}{{ self.a() }}",
    "blocks of their own": "{% filter upper %}ab{% endfilter %}{% with z = 1 %}{{ z }}{% endwith %}",
}


@pytest.mark.parametrize("source", FEATURES.values(), ids=FEATURES)
def test_the_language_is_that_of_transformers(reference, source):
    messages, names = (
        [USER, ANSWER],
        {"eos_token": reference.eos_token, "pad_token": reference.pad_token},
    )
    ours = ChatTemplate(source, names).render(messages, [TOOL])
    assert ours == theirs(
        reference, messages, tools=[TOOL], add_generation_prompt=True, chat_template=source
    )


GROW = "{% set n = namespace(x='aaaaaaaaaa', l=[1]) %}{% for i in range(60) %}<>{% endfor %}"
HOSTILE = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute walk by filter": "{{ (messages|attr('__class__')).__mro__ }}",
    "globals of a function": "{{ cycler.__init__.__globals__ }}",
    "globals of our own": "{{ raise_exception.__globals__['json'] }}",
    "format walk": "{{ '{0.__class__.__mro__}'.format('') }}",
    "write": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop test": "{% for a in range(99999) if range(99999)|sum < 0 %}x{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat a constant": "{{ 'a' * 10000000000 }}",
    "repeat a list": "{{ [1] * 10000000000 }}",
    "doubling": GROW.replace("<>", "{% set n.x = n.x + n.x %}"),
    "doubling by concatenation": GROW.replace("<>", "{% set n.x = n.x ~ n.x %}"),
    "doubling by set block": GROW.replace(
        "<>", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"
    ),
    "doubling by replace": GROW.replace("<>", "{% set n.x = n.x|replace('a', 'aa') %}"),
    "doubling by join": GROW.replace("<>", "{% set n.x = [n.x, n.x]|join %}"),
    "nested lists": GROW.replace("<>", "{% set n.l = [n.l, n.l] %}") + "{{ n.l }}",
    "nested dicts": GROW.replace("<>", "{% set n.l = dict(a=n.l, b=n.l) %}") + "{{ n.l|tojson }}",
    "nested namespaces": GROW.replace("<>", "{% set n.l = namespace(a=n.l, b=n.l) %}")
    + "{{ n.l }}",
    "nested batches": GROW.replace("<>", "{% set n.l = [n.l]|batch(2, n.l)|first %}") + "{{ n.l }}",
    "comparing nested lists": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "center": "{{ 'a'|center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "format width": "{{ '{:>10000000000}'.format(1) }}",
    "% width": "{{ '%10000000000d' % 1 }}",
    "% width from the arguments": "{{ '%*d' % (10000000000, 1) }}",
    "|format width": "{{ '%10000000000d'|format(1) }}",
    "indent": "{{ 'x'|indent(10**9, true) }}",
    "tojson indent": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "join": "{{ ('a,' * 100000).split(',')|join('b' * 100000) }}",
    "map": "{{ range(99999)|map('center', 9999)|join }}",
    "power": "{{ 9 ** 99999999 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "endless macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless loop recursion": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "huge source": "x" * 300_000,
    "much text in a loop": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "long date": "{{ strftime_now('%c' * 100000) }}",
    "random text": "{{ lipsum(1000000) }}",
    "width from a list": "{{ '{0[0]:>{0[1]}}'.format(['x', 900000000]) }}",
    "width from a dict": "{{ '{a:>{w}}'.format_map({'a': 'x', 'w': 900000000}) }}",
    "round": "{{ 1|round(6000000, 'ceil') }}",
    "sum of lists": "{{ ([range(1000)|list] * 4000)|sum(start=[]) }}",
    "bytes of a number": "{{ (1).to_bytes(900000000, 'big')|length }}",
    "bytes of a text": "{{ ('x'.encode() * 900000000)|length }}",
    "slow codec": "{{ '" + "".join(map(chr, range(0x4E00, 0x8E00))) + "'.encode('punycode') }}",
    "slow filter": "{{ ('a ' * 1000000)|pprint }}",
    "keys that collide": "{{ dict.fromkeys(range(0, 60000 * (2 ** 61 - 1), 2 ** 61 - 1)) }}",
    "test in a filter": "{{ range(99999)|select('in', range(100000, 199999)|list)|list }}",
    "test of a list": "{% set l = range(99999)|list %}{% for i in l %}{% if -1 is in l %}{% endif %}{% endfor %}",
    "method that only reads": "{% set s = 'a' * 2000000 %}{% for i in range(99999) %}{{ s.isalpha() }}{% endfor %}",
    "slices": "{% set s = 'a' * 2000000 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "equal texts": "{% set s = 'a' * 2000000 %}{% set t = s[1:] ~ 'a' %}{% for i in range(99999) %}"
    "{% if s == t %}{% endif %}{% endfor %}",
    "attribute path": "{{ [{}]|map(attribute='a.' * 7000000, default={})|list }}",
    "one large value": "{{ 'a' * 30000000 }}",
    "much to compile": "{{a}}" * 50_000,
    "much to compile in one line": "{{" + "a<" * 30_000 + "a}}",
    "search backwards": "{{ ('a' * 1900000).rfind('ab' ~ 'a' * 900000) }}",
    "split backwards": "{{ ('a' * 1900000).rsplit('ab' ~ 'a' * 900000) }}",
    "strip many letters": "{{ ('\u4e61' * 1900000).lstrip('\u4d61' * 100000 ~ '\u4e61') }}",
    "trim many letters": "{{ ('\u4e61' * 1900000)|trim('\u4d61' * 100000 ~ '\u4e61') }}",
    "sort by a long path": "{{ ('ab' * 99)|sort(attribute='0.' * 900000 ~ '0') }}",
    "sort letters": "{{ ('ab' * 900000)|sort }}",
    "urlize": "{{ ('www.' * 400000)|urlize }}",
    "division of long numbers": "{{ ('0x' ~ 'f' * 1900000)|int(0, 16) // ('0x' ~ 'f' * 900000)|int(0, 16) }}",
    "remainder of long numbers": "{{ ('0x' ~ 'f' * 1900000)|int(0, 16) % ('0x' ~ 'f' * 900000)|int(0, 16) }}",
    "a format by a test": "{{ '%999999999d' is even }}{{ '%999999999d' is divisibleby(3) }}",
    "% width from the arguments, with a name": "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
    "deep tuples as a key": "{% macro f() %}{% set n.x = varargs %}{% endmacro %}{% set n = namespace(x=()) %}"
    "{% for i in range(99999) %}{% set _ = f(n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "lists kept": "{% set n = namespace(l=[]) %}{% set s = 'abc,' * 400000 %}{% for i in range(999) %}"
    "{% set n.l = [n.l[:99], s.split(',')] %}{% endfor %}",
}


NAMED = r"^the chat template (was stopped: (it |a|Range|its )|is not valid jinja2|failed: |refuses this conversation: )"


def processor_time() -> float:
    """Of the processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_stopped_soon(source):
    render_process.end_all()  # what earlier tests spent in a process that was kept does not count
    began = processor_time()
    with pytest.raises(TemplateError, match=NAMED):
        ChatTemplate(source, seconds=0.1).render([USER])
    render_process.end_all()
    assert processor_time() - began < 1.3


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (GROW.replace("<>", "{% set n.l = [n.l, n.l] %}") + "{{ n.l == n.l }}", "True"),
        ("{{ ['b', 'a']|sort(attribute='0.' * 9000 ~ '0') }}", "['a', 'b']"),
        ("{{ strftime_now('%%' * 100000)|length }}", "100000"),
    ],
)
def test_what_only_looks_hostile_is_rendered(source, text):
    """What it takes counts, not what it could take: a list is equal to itself without a look into it."""
    assert ChatTemplate(source).render([USER]) == text


def in_a_process(code: str, **options) -> subprocess.Popen:
    """Python code with T for ChatTemplate, MESSAGES, and `workers()`, the ids of the processes that render."""
    head = (
        "import os, signal, sys, time\nfrom nanokv.text import render_process\n"
        "from nanokv.text.template import ChatTemplate as T\nMESSAGES = [{'role': 'user', 'content': 'x'}]\n"
        "def workers():\n    return [one.process.pid for one in render_process._all]\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options
    )


def output_of(code: str) -> str:
    with in_a_process(code, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and not err, err
    return out


def test_hostile_templates_stay_small():
    """The worst growers ask for up to 10 GB: their process is as large as it may be, and ours stays small."""
    names = (
        "doubling",
        "repeat",
        "doubling by set block",
        "join",
        "map",
        "much text in a loop",
        "lists kept",
    )
    code = (
        f"import resource, tracemalloc\nfrom nanokv.errors import TemplateError\ntracemalloc.start()\n"
        f"for source in {[HOSTILE[name] for name in names]!r}:\n"
        "    try: T(source).render(MESSAGES)\n    except TemplateError as error: print(error)\n"
        "render_process.end_all()\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, tracemalloc.get_traced_memory()[1])\n"
    )
    *errors, sizes = output_of(code).splitlines()
    theirs, own = map(int, sizes.split())
    assert errors == ["the chat template was stopped: it needed more than 512 MB"] * len(names)
    assert theirs * (1 if sys.platform == "darwin" else 1024) < 520e6 and own < 20e6


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_ctrl_c_is_heard_and_ends_the_render():
    code = f"t = T({SLOW!r}, seconds=60)\nprint(*workers(), flush=True)\nt.render(MESSAGES)"
    with in_a_process(code, stderr=subprocess.PIPE, start_new_session=True) as child:
        worker = int(child.stdout.readline())
        time.sleep(0.5)
        assert child.poll() is None and running(worker)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal sends it
        began = time.monotonic()
        assert "KeyboardInterrupt" in child.communicate(timeout=30)[1]
        assert time.monotonic() - began < 3 and not running(worker)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # Nobody waits for an orphan.
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("while_rendering", [False, True])
def test_no_process_outlives_ours(while_rendering):
    code = (
        f"t = T({SLOW!r}, seconds=1)\nprint(*workers(), flush=True)\n"
        f"{'t.render(MESSAGES)' if while_rendering else 'time.sleep(60)'}"
    )
    with in_a_process(code) as child:
        worker = int(child.stdout.readline())
        time.sleep(0.2)
        child.kill()
    wait_until(lambda: not running(worker))


def wait_until(done, seconds=20):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_process_that_is_gone_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}")
    gone = list(render_process._idle)  # one, or more after tests that needed two at a time
    for one in gone:
        one.process.kill()
        one.process.wait()
    assert template.render([USER]) == USER["content"]
    assert not set(map(id, gone)) & set(map(id, render_process._all))
    assert render_process._idle[-1].process.pid not in [one.process.pid for one in gone]


def test_a_process_that_is_ended_while_it_waits_costs_no_render():
    """It may still look alive when it is taken."""
    template = ChatTemplate("{{ messages[0].content }}")
    for _ in range(20):
        os.kill(render_process._idle[-1].process.pid, signal.SIGKILL)
        assert template.render([USER]) == USER["content"]


def test_a_render_whose_process_is_ended_from_outside_twice_is_named():
    template, errors = ChatTemplate(SLOW, seconds=60), []
    (one,) = render_process._idle

    def render():
        try:
            template.render([USER])
        except TemplateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.3)
    one.process.kill()
    wait_until(lambda: render_process._all - {one})  # another one renders
    assert not errors
    time.sleep(0.3)
    for other in render_process._all - {one}:
        other.process.kill()
    thread.join()
    assert errors == [
        "the chat template was stopped: the process that rendered it ended, signal SIGKILL"
    ]


def test_the_clock_ends_what_takes_no_processor_time(monkeypatch):
    """As on a system without the other limits, or where the process hangs."""
    monkeypatch.setattr(render_process, "CLOCK", 0.3)
    template = ChatTemplate("x", seconds=0.2)
    os.kill(render_process._idle[-1].process.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match=r"it ran for more than 0\.5 s"):
        template.render([USER])


def test_an_answer_that_is_too_long_is_not_read():
    process = render_process.take()
    body = b'["{{ 7 * 7 }}", {}]'
    request = render_process.HEAD.pack(len(body), 1.0, render_process.MEMORY, 100) + body
    assert process.ask(request, 1.0, 100) == ("text", "49")
    with pytest.raises(TemplateError, match="its answer has 14 bytes, more than 10"):
        process.ask(request, 1.0, 10)
    render_process.drop(process)


def test_where_no_process_can_be_started(monkeypatch, tmp_path):
    render_process.end_all()
    for executable, words in (
        (str(tmp_path / "none"), "No such file"),
        ("/bin/false", "exit code 1"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(TemplateError, match=words):
            ChatTemplate("x")


def test_threads_render_at_the_same_time():
    templates = [
        ChatTemplate(
            f"{{% for i in range(900) %}}{n}{{{{ i }}}}{{% endfor %}}{{{{ messages[0].content }}}}"
        )
        for n in range(4)
    ]
    expected = [template.render([USER]) for template in templates]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: templates[n % 4].render([USER]), range(200)))
    assert found == expected * 50 and len(render_process._idle) <= render_process.KEPT == len(
        render_process._all
    )


@pytest.mark.slow
def test_a_slow_render_does_not_hold_up_another():
    code = (
        f"from concurrent.futures import ThreadPoolExecutor\nquick, slow = T('q'), T({SLOW!r}, seconds=2)\n"
        "with ThreadPoolExecutor(1) as pool:\n    busy = pool.submit(slow.render, MESSAGES)\n    time.sleep(0.2)\n"
        "    print([quick.render(MESSAGES) for _ in range(20)].count('q'), busy.done(), flush=True)\n"
        "    print(busy.exception())"
    )
    assert output_of(code) == "20 False\nthe chat template was stopped: it ran for more than 2 s\n"


def test_a_fork_starts_its_own():
    code = (
        "t = T('{{ messages[0].content }}')\nmine = workers()\nif os.fork() == 0:\n"
        "    print(workers(), t.render(MESSAGES), workers() != mine, flush=True)\n    sys.exit(0)\n"
        "os.wait()\nprint(t.render(MESSAGES), workers() == mine)"
    )
    assert output_of(code) == "[] x True\nx True\n"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_the_process_holds_nothing(monkeypatch, tmp_path):
    """Its three streams, no variable of ours, no right to open a file: what an escape from the sandbox would find."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    render_process.end_all()
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        ChatTemplate("x")
    place = Path(f"/proc/{render_process._idle[0].process.pid}")
    assert {path.name for path in (place / "fd").iterdir()} == {"0", "1", "2"}
    names = {
        entry.partition(b"=")[0].decode()
        for entry in (place / "environ").read_bytes().split(b"\0")
        if entry
    }
    assert names <= set(render_process.ENVIRONMENT)
    limits = {
        line[:26].strip(): line[26:].split()[1]
        for line in (place / "limits").read_text().splitlines()[1:]
    }
    none = ("Max open files", "Max processes", "Max file size", "Max core file size")
    assert [limits[name] for name in none] == ["0"] * 4
    assert not {"torch", "numpy"} & {
        path.name
        for line in (place / "maps").read_text().split("\n")
        for path in Path(line[73:]).parents
    }


def test_the_process_starts_while_a_tokenizer_with_a_template_is_read(tiny_folder, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    code = (
        "from nanokv.text.tokenizer import Tokenizer\n"
        f"Tokenizer.from_folder({str(tmp_path)!r})\nprint(len(workers()))\n"
        f"own = Tokenizer.from_folder({str(tiny_folder)!r})\nbefore = workers()\nown.render(MESSAGES)\n"
        "print(len(before), workers() == before)"
    )
    assert output_of(code) == "0\n1 True\n"


def test_jinja2_is_not_imported_here():
    """It takes 30 ms; and no template runs in this process."""
    code = "T('x').render(MESSAGES)\nprint([name for name in ('jinja2', 'torch', 'numpy') if name in sys.modules])"
    assert output_of(code) == "[]\n"


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_other_families_equal_transformers(reference, name, messages):
    """Templates as Llama 3, SmolLM2, Qwen2.5, Gemma, Mistral, Phi and DeepSeek publish them: what theirs refuses (roles
    that must alternate), ours refuses too."""
    source, names = FAMILIES[name], {"bos_token": "<s>", "eos_token": reference.eos_token}
    for tools in (None, [TOOL]):
        try:
            expected = theirs(
                reference,
                messages,
                tools=tools,
                add_generation_prompt=True,
                chat_template=source,
                bos_token="<s>",
            )
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(TemplateError):
                ChatTemplate(source, names).render(messages, tools)
        else:
            assert ChatTemplate(source, names).render(messages, tools) == expected


# --- tools and calls ------------------------------------------------------------------------------------------------


SAYS = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
TOOLS_FIRST = "{% if tools %}{{ tools|tojson }}{% endif %}" + SAYS
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_what_a_template_would_leave_out_is_refused(qwen):
    for template, messages, tools, words in (
        (SAYS, [USER], [TOOL], "no place for tools"),
        (SAYS, [USER, ASKED], None, "leaves tool_calls out"),
        (TOOLS_FIRST, [USER, ASKED], [TOOL], "leaves tool_calls out"),
    ):
        own = Tokenizer(qwen.backend, qwen.names, template)
        with pytest.raises(TemplateError, match=words):
            own.render(messages, tools)
        assert own.template().render(messages, tools)  # as transformers does
    assert own.render([USER], []) == Tokenizer(qwen.backend, {}, SAYS).render([USER])
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + SAYS
    with pytest.raises(TemplateError, match="no tools"):
        Tokenizer(qwen.backend, {}, refuses).render([USER], [TOOL])
    needs = "{{ tools[0].type }}{% for m in messages %}{{ m.tool_calls[0].type }}{% endfor %}"
    assert Tokenizer(qwen.backend, {}, needs).render(
        [{"role": "assistant", "tool_calls": [CALL]}], [TOOL]
    )


CALLS = "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}ARGUMENTS{% endfor %}|{% endfor %}"
FORMS = {  # how a template prints arguments → what stands in the prompt
    "an object": ("{{ c.function.arguments|tojson }}", '{"city": "Oslo", "n": 2}'),
    "its items": (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}",
        "city=Oslo n=2 ",
    ),
    "a text": ("{{ 'json ' + c.function.arguments }}", 'json {"city": "Oslo", "n": 2}'),
    "printed": ("{{ c.function.arguments }}", '{"city": "Oslo", "n": 2}'),
    "either": (
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}",
        '{"city": "Oslo", "n": 2}',
    ),
}


@pytest.mark.parametrize(
    "arguments", [{"city": "Oslo", "n": 2}, '{"city": "Oslo", "n": 2}'], ids=["object", "text"]
)
@pytest.mark.parametrize("form", FORMS)
def test_arguments_have_the_form_that_the_template_takes(form, arguments):
    source, shown = FORMS[form]
    template = ChatTemplate(CALLS.replace("ARGUMENTS", source))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert template.render(fitted(template, messages)) == f"user:|assistant:{shown}|"


@pytest.mark.parametrize(
    ("text", "shown"), [("", "{}"), ("{", '"{"'), ("[1]", '"[1]"'), ("null", '"null"')]
)
def test_arguments_that_are_no_object_stay_what_they_are(text, shown):
    template = ChatTemplate(CALLS.replace("ARGUMENTS", "{{ c.function.arguments|tojson }}"))
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert template.render(fitted(template, [message])) == f"assistant:{shown}|"


NULLS = {  # what a template says of a content → what it says of null
    "of no interest": ("", ""),
    "is there one": ("{% if 'content' in m %}a content{% endif %}", ""),
    "is it none": (
        "{% if m.content is none %}none{% elif m.tool_calls %}{{ 1 / 0 }}{% endif %}",
        "none",
    ),
    "its length": ("{{ m['content'] + '!' }}", "!"),
    "its methods": ("{{ m.content.strip() }}", ""),
}


@pytest.mark.parametrize("content", ["null", "absent"])
@pytest.mark.parametrize("name", NULLS)
def test_null_is_null_where_the_template_can_take_it(name, content, reference):
    """As transformers leaves it out, unless the template then fails, or shows no call."""
    source, shown = NULLS[name]
    loop = CALLS.replace("ARGUMENTS", "{{ c.function.arguments|tojson }}").replace(
        "{% for c", source + "{% for c"
    )
    template, said = ChatTemplate(loop), {} if content == "absent" else {"content": None}
    messages = [{"role": "assistant", "tool_calls": [CALL]} | said]
    assert template.render(fitted(template, messages)).startswith(f"assistant:{shown}{{")
    try:
        expected = theirs(reference, messages, chat_template=loop)
    except Exception:
        return
    assert template.render(fitted(template, messages)) == expected


def test_messages_without_calls_stay_and_what_is_none_is_left_to_the_template():
    template = ChatTemplate(SAYS)
    odd = [
        5,
        "x",
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": [1, {"function": 2}]},
    ]
    for messages in ([USER, ANSWER], odd):
        assert fitted(template, messages) == messages


def test_an_honest_long_chat_is_rendered(qwen):
    """2,000 turns and a 200 kB paste render: the bounds are for attacks only."""
    paste = {"role": "user", "content": "naïve " * 33_000}
    messages = [USER, {"role": "assistant", "content": "Sunny."}] * 1000 + [paste]
    assert len(qwen.render(messages)) > 200_000


def test_the_input_raises_the_limits():
    """A 4 MB document is not an attack by the template."""
    big = "x" * 4_000_000
    shown = ChatTemplate(
        "{{ messages[0].content + messages[0].content|replace('y', 'z') }}" * 8
    ).render([{"role": "user", "content": big}])
    assert len(shown) == 16 * len(big)


def test_errors_of_the_template_are_typed():
    with pytest.raises(TemplateError, match=r"refuses this conversation: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([USER])
    with pytest.raises(TemplateError, match="not valid jinja2, line 2"):
        ChatTemplate("\n{% for x in %}")
    with pytest.raises(TemplateError, match="no element 5"):
        ChatTemplate("{{ messages[5].content.x }}").render([USER])
    with pytest.raises(TemplateError, match="TypeError"):
        ChatTemplate("{{ 1 + 'a' }}").render([USER])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ("hi", "a list of messages"),
        (["hi"], "message 1 is a str"),
        ([USER, {"role": "bot", "content": "x"}], "message 2 has the role 'bot'"),
        ([{"content": "x"}], "message 1 has the role None"),
        ([{"role": "user"}], r"message 1 \(user\) has no content"),
        (
            [USER, {"role": "assistant", "text": "a typo"}],
            r"message 2 \(assistant\) has no content",
        ),
        ([{"role": "user", "content": 3}], "content of type int, not text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "content of type list, not text",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": "y"}], "tool_calls is not a list"),
    ],
)
def test_messages_that_would_vanish_silently_are_refused(messages, words):
    """Qwen3's template renders an unknown role or a non-text content as nothing."""
    with pytest.raises(TemplateError, match=words):
        ChatTemplate("x").render(messages)


def test_where_the_template_needs_a_text_none_is_refused_as_by_transformers(qwen, reference):
    """The published template reads a system message without asking whether it has a content."""
    messages = [{"role": "system", "content": None}, USER]
    with pytest.raises(transformers.utils.chat_template_utils.jinja2.exceptions.UndefinedError):
        theirs(reference, messages)
    with pytest.raises(
        TemplateError, match=r"refuses this conversation: .* has no attribute 'content'"
    ):
        qwen.render(messages)


def test_values_that_json_cannot_hold_are_refused():
    loop = []
    loop.append(loop)
    for options in ({"x": loop}, {"tools": [{(1, 2): 3}]}):
        with pytest.raises(TemplateError, match="JSON values"):
            ChatTemplate("x").render([USER], **options)


def test_tools_must_be_schemas():
    with pytest.raises(TemplateError, match="tools must be a list"):
        ChatTemplate("x").render([USER], tools=[print])


def test_objects_with_methods_do_not_reach_the_template():
    class Text(str):
        def danger(self):
            return "reached"

    assert type(plain(Text("a"))) is str and plain({1: (Text("b"), object())}) == {
        1: ("b", "<object>")
    }
    message = {"role": "user", "content": Text("a")}
    assert ChatTemplate("{{ messages[0].content.danger is defined }}").render([message]) == "False"


def test_a_render_leaves_messages_and_later_renders_alone(qwen):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "c", "name": None},
    ]
    before = repr(messages)
    assert qwen.render(messages) == qwen.render(messages) and repr(messages) == before


def test_no_template_is_an_error(qwen):
    base = Tokenizer(qwen.backend, qwen.names)
    with pytest.raises(TemplateError, match="no chat template"):
        base.render([USER])
