"""Chat templates that attack: out of the sandbox, and against time and memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from quarrel.errors import QuarrelError, RequestError, TokenizerError
from quarrel.tokenizer import load_tokenizer
from quarrel.tokenizer.renderer import MAX_TEMPLATE_BYTES, WORKER, Renderer
from tests.tokenizer.chat_templates import CHATML
from tests.tokenizer.synthetic import bpe_metadata

TOKENIZER = load_tokenizer(bpe_metadata(chat_template=CHATML))
CHAT = [{"role": "user", "content": "hello"}]

ESCAPES = [
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum.__globals__.os.system('id') }}",
    "{{ range.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'].modules }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ {}.__class__.__base__.__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages | attr('__class__') | attr('__base__') }}",
    "{{ '' | attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ '' | attr('_' ~ '_class_' ~ '_') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "{{ ('{0.__class__}' | string).format(1) }}",
    "{{ ['{0.__class__}'.format] | map('call') | list }}{{ (['{0.__class__}'] | map(attribute='format') | first)(1) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages[0].content._levels }}{{ messages[0].content.__class__ }}",
    "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% set x = messages.clear() %}",
    "{{ dict.mro() }}{{ dict.__subclasses__() }}",
    "{{ cycler('a').next.__func__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% for x in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
    "{{ messages | groupby('__class__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
    "{{ get_flashed_messages.__globals__ }}",
]

BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ '%1000000000d' % 5 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ [0] * 10**9 }}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ (2 ** (10 ** 9)) | string }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ range(99999) | map('string') | list | string | list | sort | join | list | sort | length }}" * 40,
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 'ab' | replace('', 'c' * 10**6) | replace('c', 'c' * 10**6) }}",
    "{{ (('a' * 30) + 'b') | wordwrap(1) }}{% for i in range(99999) %}{{ ('a ' * 9999) | wordcount }}{% endfor %}",
    "{{ 'x' | indent(10**9) }}{{ ('x\n' * 10**6) | indent(10**6) }}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + " ~ ".join(["'a' * 9**9"] * 200) + " }}",
    "{{ " + "-" * 60_000 + "1 }}",
]


def test_there_are_enough_of_both() -> None:
    assert len(ESCAPES) >= 25
    assert len(BOMBS) >= 15


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_leaves_the_sandbox(template: str) -> None:
    with pytest.raises(QuarrelError) as caught:
        TOKENIZER.render_chat(CHAT, template=template)
    message = str(caught.value)
    assert "uid=" not in message
    assert "root:" not in message
    if "__" in template and "get_flashed" not in template and "lipsum" not in template:
        assert "must not touch" in message or "failed on these" in message


def test_what_a_template_is_refused_for_is_named() -> None:
    with pytest.raises(TokenizerError, match="reaches for what it must not touch: the attribute __class__ of a list"):
        TOKENIZER.render_chat(CHAT, template="{{ messages.__class__ }}")


@pytest.mark.parametrize("template", BOMBS)
def test_no_template_takes_time_or_memory(template: str) -> None:
    TOKENIZER.render_chat(CHAT)
    start = time.monotonic()
    with pytest.raises(QuarrelError):
        TOKENIZER.render_chat(CHAT, template=template)
    # Measured: 0.3 s at most, of which 250 ms are the limit.
    assert time.monotonic() - start < 12
    assert TOKENIZER.render_chat(CHAT).startswith("<|im_start|>system")


def test_endless_loops_are_stopped_by_the_clock() -> None:
    with pytest.raises(TokenizerError, match=r"took too much time \(it has 250 ms\), and was stopped; choose another"):
        TOKENIZER.render_chat(CHAT, template=BOMBS[7])


def test_long_texts_are_stopped_by_their_size() -> None:
    with pytest.raises(TokenizerError, match="writes more than 4 MiB of text"):
        TOKENIZER.render_chat(CHAT, template=BOMBS[8])
    four = TOKENIZER.render_chat([{"role": "user", "content": "a" * (4 << 20)}], template="{{ messages[0].content }}")
    assert len(four) == 4 << 20


def test_memory_is_limited() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory of a process is limited on Linux only")
    with pytest.raises(TokenizerError, match="needs more than 256 MiB of memory"):
        TOKENIZER.render_chat(CHAT, template=BOMBS[0])


def test_a_template_cannot_smuggle_the_marks_of_found_tokens() -> None:
    for code in ("\\ud800\\ud801\\ud801\\ud801", "\\udfff", "\\udbff\\ud800"):
        with pytest.raises(TokenizerError, match="wrote what is no text"):
            TOKENIZER.apply_chat(CHAT, template=f"{{{{ '{code}' }}}}")


def test_a_template_has_a_largest_size() -> None:
    TOKENIZER.render_chat(CHAT, template="{{ 1 }}".ljust(MAX_TEMPLATE_BYTES))
    with pytest.raises(TokenizerError, match=f"has {MAX_TEMPLATE_BYTES + 1} bytes, wanted at most {MAX_TEMPLATE_BYTES}"):
        TOKENIZER.render_chat(CHAT, template="{{ 1 }}".ljust(MAX_TEMPLATE_BYTES + 1))


def pid(renderer: Renderer) -> int:
    assert renderer.child is not None
    return renderer.child.pid


def test_one_worker_is_used_again_until_it_is_stopped() -> None:
    renderer = Renderer()
    variables = {"messages": CHAT}
    renderer.render("a{{ messages[0].content }}", variables, {})
    first = pid(renderer)
    assert renderer.render("b", variables, {})[0][0] == "b"
    with pytest.raises(RequestError):
        renderer.render("{{ raise_exception('x') }}", variables, {})
    assert pid(renderer) == first
    with pytest.raises(TokenizerError):
        renderer.render(BOMBS[7], variables, {})
    assert renderer.render("c", variables, {})[0][0] == "c"
    second = pid(renderer)
    assert second != first
    renderer.close()
    renderer.close()
    assert renderer.render("d", variables, {})[0][0] == "d"
    assert pid(renderer) != second
    renderer.close()


def test_a_worker_that_died_is_replaced() -> None:
    renderer = Renderer()
    renderer.render("a", {"messages": CHAT}, {})
    os.kill(pid(renderer), 9)
    for _ in range(100):
        if not renderer.child.running:  # type: ignore[union-attr]
            break
        time.sleep(0.01)
    assert renderer.render("b", {"messages": CHAT}, {})[0][0] == "b"
    renderer.close()


def test_an_interrupted_reply_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("first", "interrupted", "next")]
    renderer.render("{{ messages[0].content }}", chats[0], {})
    with monkeypatch.context() as patch:
        patch.setattr("quarrel.child.wire.Link.receive", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            renderer.render("{{ messages[0].content }}", chats[1], {})
    assert renderer.render("{{ messages[0].content }}", chats[2], {})[0][0] == "next"
    renderer.close()


def test_the_worker_goes_with_its_renderer() -> None:
    renderer = Renderer()
    renderer.render("a", {"messages": CHAT}, {})
    process = renderer.child.process  # type: ignore[union-attr]
    del renderer
    gc.collect()
    assert process.returncode is not None


def test_threads_share_one_worker() -> None:
    texts: dict[int, str] = {}

    def work(at: int) -> None:
        for _ in range(20):
            texts[at] = TOKENIZER.render_chat([{"role": "user", "content": str(at)}], template="{{ messages[0].content }}")

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {at: str(at) for at in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_a_worker_of_its_own() -> None:
    code = """
import os
from quarrel.tokenizer.renderer import Renderer
renderer = Renderer()
chat = {"messages": [{"role": "user", "content": "x"}]}
renderer.render("a", chat, {})
child = os.fork()
if child == 0:
    os._exit(0 if renderer.render("b", chat, {})[0][0] == "b" else 1)
assert renderer.render("c", chat, {})[0][0] == "c"
assert os.waitpid(child, 0)[1] == 0
assert renderer.render("d", chat, {})[0][0] == "d"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_the_worker_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY_FOR_TEST", "canary")
    renderer = Renderer()
    renderer.render("a", {"messages": CHAT}, {})
    environment = Path(f"/proc/{pid(renderer)}/environ")
    if not environment.exists():
        pytest.skip("no /proc here")
    assert b"canary" not in environment.read_bytes()
    limits = Path(f"/proc/{pid(renderer)}/limits").read_text()
    for name in ("Max open files", "Max file size", "Max core file size", "Max processes"):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert line.split()[len(name.split())] == "0", line
    renderer.close()


def test_the_worker_needs_nothing_but_jinja() -> None:
    code = f"import runpy, sys; runpy.run_path({str(WORKER)!r}, run_name='worker'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "jinja2" in loaded
    assert not loaded & {"numpy", "tokenizers", "sentencepiece"}
    ours = {name for name in done.stdout.split() if name.partition(".")[0] == "quarrel"}
    assert ours == {"quarrel", "quarrel.child", "quarrel.child.sandbox"}
