"""Compiles one output format, in a process of its own: `python -m gateway.format_compiler`, the format on stdin.

A format comes from a client and may be made to hurt. llguidance recurses on the stack and allocates what it is told to:
a schema of 40 bytes can ask for gigabytes, one of 60 kB overflow the stack, and a process does not survive either. So
this one has limits, and its end by a signal is an answer too. Its stack is a quarter of what an engine's thread has:
what compiles here doesn't overflow there.

Prints what is wrong with the format; nothing when all is well. In: {"kind": FormatKind, "text": ...} as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Final

from llguidance import LLMatcher, LLTokenizer, grammar_from

CPU_S: Final = 4
_MEMORY_BYTES: Final = 1 << 29
"""Of addresses. Formats of 64 K characters took 20 to 50 MB."""
_STACK_BYTES: Final = 2 << 20
_MAY_NAME_TOKENS: Final = ("<|", "<[")
"""Of the model's vocabulary, in a grammar: not known here."""


def problem_of(kind: str, text: str) -> str:
    try:
        if kind in ("json", "json_object"):
            grammar = LLMatcher.grammar_from_json_schema(text or '{"type": "object"}')
        else:
            grammar = grammar_from(kind, text)  # type: ignore[arg-type] # its own words
    except ValueError as error:
        return str(error)
    if problem := str(LLMatcher.validate_grammar(grammar)):
        return problem
    if kind == "grammar" and any(mark in text for mark in _MAY_NAME_TOKENS):
        return ""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_bitmask()  # some errors show only with the first token
    return str(matcher.get_error()).partition("<state>")[0]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    wanted = json.load(sys.stdin)
    threading.stack_size(_STACK_BYTES)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(problem_of(wanted["kind"], wanted["text"])))
    thread.start()
    thread.join()
    sys.stdout.write(found[0] if found else "it makes the compiler fail")


if __name__ == "__main__":
    main()
