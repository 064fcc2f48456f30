"""Test the layout of the package: allowed imports, and maximum sizes of folders, files and functions."""

import ast
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vit"
FILES = sorted(PACKAGE.rglob("*.py"))
TRAVELING = [path for path in FILES if path.parent == PACKAGE / "model"]

OPTIMIZING = PACKAGE / "model" / "pipeline_hf_vit.py"
# Modules that the Python files of checkpoints may import: `ALWAYS_THERE` always, `OPTIONAL` only if installed.
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy", *sys.stdlib_module_names}
OPTIONAL = {"PIL", "torchvision", "torchcodec", "scipy"}
# Each folder may import only from the folders listed before it.
ORDER = (
    *("model", "flops", "extras", "outputs", "processes", "convert", "data", "evaluation", "visualize", "options"),
    *("tasks", "features", "inference", "training", "runs", "auditing"),
    *("api", "pretraining", "commands", "cli", "start", "__main__"),
)
LARGE_FOLDERS = {"model", "convert/families"}
LONG_FUNCTIONS = {"preprocess"}

MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 21, 700, 60


def get_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {get_name(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes_with_parents(
    node: ast.AST, parents: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    for child in ast.iter_child_nodes(node):
        yield child, (*parents, node)
        yield from nodes_with_parents(child, (*parents, node))


def is_inside(parents: tuple[ast.AST, ...], *words: str) -> bool:
    """Return whether a syntax node is inside an `if` statement whose condition contains the given words."""
    tests = [ast.unparse(parent.test) for parent in parents if isinstance(parent, ast.If)]
    return any(all(word in test for word in words) for test in tests)


def is_for_optimize(node: ast.AST, parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is the import for `optimize=True`, the only import of hf_vit in checkpoint files."""
    is_tried = any(isinstance(parent, ast.Try) and node in parent.body for parent in parents)
    return is_tried and ast.unparse(node) == "from hf_vit.inference.optimize import optimize_for_inference"


def is_never_called(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is in `_import_saved_files`. Its imports make transformers copy the imported files."""
    return any(isinstance(parent, ast.FunctionDef) and parent.name == "_import_saved_files" for parent in parents)


def imported_by(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a file imports."""
    is_folder = path.name == "__init__.py"
    for node, parents in nodes_with_parents(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if not isinstance(node, ast.ImportFrom) or is_never_called(parents) or is_inside(parents, "TYPE_CHECKING"):
            continue
        if path == OPTIMIZING and is_for_optimize(node, parents):
            continue
        source = node.module or ""
        if node.level:
            folders = get_name(path).split(".")
            folders = folders[: len(folders) - node.level + is_folder]
            source = ".".join((*folders, *filter(None, [node.module])))
        for alias in node.names:
            name = f"{source}.{alias.name}"
            yield from (known for known in (name if name in MODULES else source,) if known in MODULES)


@cache
def imports() -> dict[str, set[str]]:
    """Return, for each module of this package, the modules of the package that it imports."""
    return {name: set(imported_by(path)) - {name} for name, path in MODULES.items()}


def folder_of(module: str) -> str:
    """Return the top-level folder of a module, or "" if the module is not in a folder."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_files_saved_with_models_import_only_neighbors_and_common_packages() -> None:
    traveling = ((file, *found) for file in TRAVELING for found in nodes_with_parents(tree_of(file)))
    for path, node, parents in traveling:
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{path.name}:{node.lineno} leaves the folder"
            assert node.module is not None or path.name == "__init__.py", f"{path.name}:{node.lineno} names no file"
            assert "." not in (node.module or ""), f"{path.name}:{node.lineno}: a folder within does not travel"
            continue
        if path == OPTIMIZING and is_for_optimize(node, parents):
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for root in (str(name).partition(".")[0] for name in names):
            assert root in ALWAYS_THERE or root in OPTIONAL, f"{path.name}:{node.lineno} imports {root}"
            is_safe = root in ALWAYS_THERE or is_inside(parents, "is_", "_available()")
            assert is_safe, f"{path.name}:{node.lineno}: {root} may be missing"


def test_imports_run_one_way_and_in_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(imports()[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())

    wrong = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (source := folder_of(module)) and (target := folder_of(other)) not in ("", source)
        if target not in ORDER[: ORDER.index(source)]
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_folders_files_and_functions_are_small_enough_to_be_read() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in FILES)
    assert {name for name, count in counts.items() if count > MOST_FILES} <= LARGE_FOLDERS
    wrong = []
    for path in FILES:
        sizes = [("", len(path.read_text(encoding="utf-8").splitlines()), MOST_LINES)]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_FUNCTIONS:
                sizes += [(node.name, (node.end_lineno or 0) - node.lineno + 1, MOST_LINES_OF_A_FUNCTION)]
        wrong += [f"{path.relative_to(ROOT)} {name}: {count} lines" for name, count, most in sizes if count > most]
    assert not wrong, "\n".join(wrong)


SAMPLE = '''"""Docstring

of two paragraphs."""

# a comment

def area(width, height):  # another comment
    """Return the area."""
    text = """no
    docstring

    """
    return width * height
'''


def test_lines_of_code_are_counted_without_docstrings_comments_and_blank_lines() -> None:
    counting = runpy.run_path(str(ROOT / "scripts" / "count_code.py"))
    assert counting["count_lines"](SAMPLE) == 5
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert counting["reach"]("a", imports) == {"a", "b", "c"}
    assert counting["reach"]("d", imports) == {"a", "b", "c"}
    assert set(counting["imported_by"]("hf_vit.options.recipe")) == {"hf_vit.options.library", "hf_vit.options.names"}
