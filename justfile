# `just` lists the recipes. They expect the environment in .venv (see CONTRIBUTING.md), or PYTHON=... before the command.

python := env_var_or_default("PYTHON", ".venv/bin/python")

_default:
    @just --list

# all tests, or some: just test tests/ops -k rope
test *args:
    {{python}} -m pytest {{args}}

# style and types
lint:
    {{python}} -m ruff check .
    {{python}} -m ruff format --check .
    {{python}} -m mypy

# what ruff can mend by itself
fix:
    {{python}} -m ruff check --fix .
    {{python}} -m ruff format .

# a developers' bench in bench/, such as: just bench check.triton_check ops
bench name *args:
    {{python}} -m bench.{{name}} {{args}}

# wheel and sdist, as they are published: the same bytes twice, sound metadata, every file of the checkout
dist:
    {{python}} -m check_manifest
    {{python}} -m build
    {{python}} -m build -o build/again
    diff -r dist build/again
    {{python}} -m twine check --strict dist/*

# pages that are made from the code
docs:
    {{python}} -m tools.docs
    {{python}} -m tools.coverage

# the documentation site, into build/site (extra docs)
site:
    {{python}} -m tools.site

# every fuzzer, half an hour in all
fuzz *args:
    {{python}} -m fuzz {{args}}
