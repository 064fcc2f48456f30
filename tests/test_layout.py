"""Layout of the package: allowed imports, and size limits of folders, files and functions."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vit"
FILES = sorted(PACKAGE.rglob("*.py"))
TRAVELING = [path for path in FILES if path.parent == PACKAGE / "model"]

OPTIMIZING = PACKAGE / "model" / "pipeline_hf_vit.py"
# Libraries that files saved with checkpoints may import, and those they may import only if installed.
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy", *sys.stdlib_module_names}
OPTIONAL = {"PIL", "torchvision", "torchcodec", "scipy"}
# Each folder may import from those before it.
ORDER = (
    *("model", "flops", "extras", "outputs", "convert", "data", "evaluation", "visualize", "options", "inference"),
    *("training", "features", "api", "pretraining", "commands", "cli", "start", "__main__"),
)
LARGE_FOLDERS = {"model", "convert/families"}
LONG_FUNCTIONS = {"preprocess"}

MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 21, 700, 60


def name_of(path: Path) -> str:
    """Return the module name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes_with_parents(
    node: ast.AST, parents: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    for child in ast.iter_child_nodes(node):
        yield child, (*parents, node)
        yield from nodes_with_parents(child, (*parents, node))


def is_where_installed(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is inside `if is_…_available():`."""
    tests = (ast.unparse(parent.test) for parent in parents if isinstance(parent, ast.If))
    return any("is_" in test and "_available()" in test for test in tests)


def is_for_types(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is inside `if TYPE_CHECKING:`, which never runs."""
    return any(isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING" for parent in parents)


def is_for_optimize(node: ast.AST, parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is the import for `optimize=True`, which may fail in files saved with checkpoints."""
    is_tried = any(isinstance(parent, ast.Try) and node in parent.body for parent in parents)
    return is_tried and ast.unparse(node) == "from hf_vit.inference.optimize import optimize_for_inference"


def is_never_called(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether a node is in the function that is never called and only lists the files to save."""
    return any(isinstance(parent, ast.FunctionDef) and parent.name == "_travel_together" for parent in parents)


def imported_by(path: Path) -> Iterator[str]:
    """Return the files of this package that a file imports."""
    is_folder = path.name == "__init__.py"
    for node, parents in nodes_with_parents(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if not isinstance(node, ast.ImportFrom) or is_never_called(parents) or is_for_types(parents):
            continue
        if path == OPTIMIZING and is_for_optimize(node, parents):
            continue
        source = node.module or ""
        if node.level:
            folders = name_of(path).split(".")
            folders = folders[: len(folders) - node.level + is_folder]
            source = ".".join((*folders, *filter(None, [node.module])))
        for alias in node.names:
            name = f"{source}.{alias.name}"
            yield from (known for known in (name if name in MODULES else source,) if known in MODULES)


@cache
def imports() -> dict[str, set[str]]:
    """Return the package files imported by each file of this package."""
    return {name: set(imported_by(path)) - {name} for name, path in MODULES.items()}


def folder_of(module: str) -> str:
    """Return the top-level folder of a file in the package, or "" if there is none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_what_travels_imports_its_neighbors_and_what_everybody_has() -> None:
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
            assert root in ALWAYS_THERE or is_where_installed(parents), (
                f"{path.name}:{node.lineno}: {root} may be missing"
            )


def test_no_files_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(imports()[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_imports_between_folders_run_one_way() -> None:
    wrong = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (source := folder_of(module)) and (target := folder_of(other)) not in ("", source)
        if target not in ORDER[: ORDER.index(source)]
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_folders_are_small_enough_to_be_read() -> None:
    folders = {path.parent for path in FILES}
    counts = {folder.relative_to(PACKAGE).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name for name, count in counts.items() if count > MOST_FILES} <= LARGE_FOLDERS


def test_files_and_functions_are_small_enough_to_be_read() -> None:
    wrong = []
    for path in FILES:
        count = len(path.read_text(encoding="utf-8").splitlines())
        wrong += [f"{path.relative_to(ROOT)} has {count} lines"] if count > MOST_LINES else []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_FUNCTIONS:
                lines = (node.end_lineno or 0) - node.lineno + 1
                wrong += (
                    [f"{path.relative_to(ROOT)}: {node.name} has {lines}"] if lines > MOST_LINES_OF_A_FUNCTION else []
                )
    assert not wrong, "\n".join(wrong)
