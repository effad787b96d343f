"""Chat templates that take too much, or ask for what they may not have."""

from collections.abc import Mapping

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_TWICE = (
    "{{% set ns = namespace(x={}) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"
)

ATTACKS: Mapping[str, tuple[str, str]] = {
    "a range without end": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "nested loops": (NESTED, "its process ended"),
    "a long text": ("{{ 'a' * 10**10 }}", "more memory"),
    "a text that grows": ("{{ ('a' * 10**6).replace('a', 'b' * 1000) }}", "more memory"),
    "a text that doubles": (_TWICE.format("'a'", "ns.x ~ ns.x"), "more memory"),
    "a list that doubles": (_TWICE.format("[0]", "ns.x + ns.x"), "more memory"),
    "a gigabyte in pieces": (
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "more memory",
    ),
    "a wide format": ("{{ '%999999999s' | format('a') }}", "more memory"),
    "a wide field": ("{{ '{:>999999999}'.format('a') }}", "more memory"),
    "a wide filter": ("{{ range(99999) | map('center', 99999) | list }}", "more memory"),
    "a long batch": ("{{ [1] | batch(10**9, 0) | list }}", "more memory"),
    "a deep indent": ("{{ 'a' | indent(10**10, true) }}", "more memory"),
    "a large number": ("{{ 9 ** (9 ** 9) }}", "its process ended"),
    "more than it may write": ("{{ 'a' * (2**20 + 1) }}", "it writes more than 1048576 bytes"),
    "attributes": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "attributes by a filter": ("{{ (''|attr('__class__')).mro() }}", "SecurityError"),
    "attributes by a map": ("{{ ['']|map(attribute='__class__')|list|tojson }}", "Undefined"),
    "globals": ("{{ namespace.__init__.__globals__ }}", "SecurityError"),
    "changes": ("{{ messages.append(1) }}", "SecurityError"),
    "a cycle in JSON": (
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}",
        "not JSON serializable",
    ),
    "a macro without end": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    "a macro in place of a function": (
        "{% macro range(n) %}{{ range(n) }}{% endmacro %}{{ range(3) }}",
        "RecursionError",
    ),
    "deep brackets": (f"{{{{ {'(' * 5000}1{')' * 5000} }}}}", "RecursionError"),
    "another template": ("{% include '/etc/passwd' %}", "no loader"),
    "a parent": ("{% extends '/etc/passwd' %}", "no loader"),
    "a module": ("{% import 'os' as os %}", "no loader"),
    "half a pair": ("{{ '\\ud800' }}", "half of a surrogate pair"),
    "no number": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "no template": ("{% if %}", "TemplateSyntaxError"),
    "what is not there": ("{{ a.b }}", "'a' is undefined"),
}
"""By their kind: the template, and what its failure says (within 64 MiB, and 1 MiB of text)."""
