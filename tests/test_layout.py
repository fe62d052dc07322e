"""The shape of the tree: who imports whom, how long things may be, and names that say nothing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("kernels", "inkling", "model_repository", "demo", "benchmarks")
MAX_MODULE_LINES, MAX_MODEL_LINES, MAX_FUNCTION_LINES = 400, 100, 60
# package: what it must not import. Imports run one way: model_repository -> inkling -> kernels.
FORBIDDEN = {
    "kernels": ("inkling", "model_repository", "tests", "demo", "transformers"),
    "inkling/engine": ("inkling.model", "kernels", "torch", "tests", "demo", "transformers"),
    "inkling/model": ("inkling.bls", "inkling.interface", "inkling.server", "tests", "demo", "transformers"),
    "inkling": ("model_repository", "tests", "demo", "transformers", "triton_python_backend_utils"),
    "model_repository": ("kernels", "tests", "demo", "transformers"),
}
UNPICKLING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
ENVIRONMENT_READERS = {"inkling/settings.py", "inkling/server.py"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "misc", "helpers", "lib", "core", "shared"}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name(path))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder):
    broken = [
        f"{name(path)} imports {module}"
        for path in modules(folder)
        for module in imported(path)
        for banned in FORBIDDEN[folder]
        if module == banned or module.startswith(banned + ".")
    ]
    assert not broken


def test_modules_fit_their_budget():
    def budget(path: Path) -> int:
        return MAX_MODEL_LINES if path.name == "model.py" else MAX_MODULE_LINES

    lengths = {path: len(path.read_text().splitlines()) for path in modules(*CODE, "tests")}
    assert not [f"{name(path)}: {lines} lines" for path, lines in lengths.items() if lines > budget(path)]


def test_functions_fit_their_budget():
    too_long = []
    for path in modules(*CODE):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                is_exempt = "command" in decorators or "jit" in decorators  # one line an option; device code
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES and not is_exempt:
                    too_long.append(f"{name(path)}: {node.name} has {lines} lines")
    assert not too_long


def test_every_name_says_something():
    def parts(path: Path) -> set[str]:
        return {part.strip("_") for part in Path(name(path)).with_suffix("").parts}

    assert not [name(path) for path in modules(*CODE, "tests") if NAMES_THAT_SAY_NOTHING & parts(path)]


def test_the_import_path_is_never_edited():
    edit = re.compile(r"\bsys\.path(\.(append|extend|insert|pop|remove)\b|\[.*\] =| \+?= )")
    assert not {name(path) for path in modules(*CODE, "tests") if edit.search(_code(path))}


def test_the_environment_is_read_in_two_places():
    readers = {name(p) for p in modules(*CODE) if re.search(r"\bos\.(environ|getenv|putenv)\b", _code(p))}
    assert readers <= ENVIRONMENT_READERS


def test_nothing_is_unpickled():
    """Checkpoints are safetensors and JSON; what processes exchange is plain fields."""
    served = modules("kernels", "inkling", "model_repository")
    assert not {
        name(path) for path in served if UNPICKLING & {module.split(".")[0] for module in imported(path)}
    }
    load = re.compile(r"\btorch\.load\b|allow_pickle|\b(eval|exec)\(")
    assert not {name(path) for path in served if load.search(_code(path).replace("request.exec()", ""))}


def test_the_backend_module_is_imported_by_models_alone():
    importers = {name(p) for p in modules(*CODE, "tests") if "triton_python_backend_utils" in imported(p)}
    assert importers <= {name(path) for path in modules("model_repository", "benchmarks/null_repository")}


def test_the_readme_shows_the_tree_as_it_is():
    block = re.search(r"```\n(\.\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "the README has no fenced tree that begins with a line '.'"
    shown, folders = set(), {0: ROOT}
    for line in block[1].splitlines()[1:]:
        if not (match := re.match(r"([│ ]*)[├└]── (\S+)", line)):
            continue
        depth = len(match[1]) // 4
        path = folders[depth] / match[2].rstrip("/")
        folders[depth + 1] = path
        shown.add(path)
    assert not [name(path) for path in shown if not path.exists()]
    assert not [
        folder for folder in (*CODE, "tests") if (ROOT / folder).is_dir() and ROOT / folder not in shown
    ]


def _code(path: Path) -> str:
    """The module without comments and docstrings."""
    return ast.unparse(_Undocumented().visit(ast.parse(path.read_text())))


class _Undocumented(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Expr(ast.Constant(...)) if is_text else node
