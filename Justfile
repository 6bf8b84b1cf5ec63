# Recipes for working on Tessera. Each one installs what it needs into .venv first, so a fresh clone
# needs only: python3 -m venv .venv && .venv/bin/pip install -q rust-just && .venv/bin/just demo

set shell := ["bash", "-euo", "pipefail", "-c"]

# The stamp is named after what an install depends on: change either file, and the next recipe installs again.
stamp := ".venv/.installed-" + sha256(read("pyproject.toml") + read("constraints.txt"))

# Nothing is written outside the checkout and the temporary folder, whatever HOME is or isn't.
cache := justfile_directory() / ".venv/cache"
export TRITON_HOME := cache
export XDG_CACHE_HOME := cache
export HF_HOME := cache / "huggingface"
export HF_HUB_OFFLINE := "1"

# List the recipes
default:
    @{{just_executable()}} --list --unsorted

# Trace, prove, profile, place, run and adapt the embedded model; artifacts go to demo-out/
demo: _install
    .venv/bin/tessera demo -o demo-out

# Run the tests: first side by side, then those that measure time alone
test: _install
    .venv/bin/python -m pytest -q -n 2 -m "not serial"
    .venv/bin/python -m pytest -q -m serial

# Run the tests with the slow ones
test-slow: _install
    .venv/bin/python -m pytest -q --slow -n 2 -m "not serial"
    .venv/bin/python -m pytest -q --slow -m serial

# Check style, types and layering; change nothing
lint: _install
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports

# Rewrite what the linter can put right by itself
format: _install
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# Run one benchmark (benchmarks/NAME.py): one JSON object, exit code 0 only where every bar holds
bench NAME: _install
    @.venv/bin/python -m benchmarks.{{NAME}}

# Rewrite the golden files under tests/golden/ from what the code gives now; read the diff before you commit it
golden: _install
    .venv/bin/python -m pytest -q --golden --slow

# Build the sdist, and from it the wheel, into dist/
wheel: _install
    rm -rf dist
    .venv/bin/python -m build --outdir dist

# Install the package and its development tools into .venv, once per state of pyproject.toml and constraints.txt
_install:
    @test -x .venv/bin/python || python3 -m venv .venv
    @test -e {{stamp}} || { echo "installing into .venv (a few minutes the first time)" >&2; \
        .venv/bin/python -m pip install -q -c constraints.txt -e '.[models,silicon,dev]'; \
        rm -f .venv/.installed-*; touch {{stamp}}; }
