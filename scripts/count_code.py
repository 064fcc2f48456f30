"""Print the lines of code of each folder of hf_vit, and its imports in circles and against the order of the folders.

A line of code is a line that is not blank and not part of a comment or docstring. Usage: python scripts/count_code.py
"""

import ast
import io
import runpy
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[1]
ORDER: tuple[str, ...] = runpy.run_path(str(ROOT / "tests" / "test_layout.py"))["ORDER"]
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in (ROOT / "hf_vit").rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}
NO_CODE = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_lines(source: str) -> int:
    """Return the number of lines of code in the source of a Python file."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    lines -= {number for number, line in enumerate(source.splitlines(), start=1) if not line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def imported_by(name: str) -> Iterator[str]:
    """Yield the modules of hf_vit that a module imports anywhere, including imports for type checking."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            names = (f"{source}.{alias.name}" for alias in node.names)
            yield from (found for found in (one if one in MODULES else source for one in names) if found in MODULES)


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return all modules that a module imports, directly or through others."""
    found, pending = set[str](), [start]
    while pending:
        new = imports[pending.pop()] - found
        found |= new
        pending += new
    return found


def folder_of(name: str) -> str:
    """Return the top-level folder or file of a module, or "" for the package itself."""
    return name.split(".")[1] if "." in name else ""


def main() -> None:
    """Print the counts."""
    counts: Counter[str] = Counter()
    for file in MODULES.values():
        folder = file.relative_to(ROOT).parts[1]
        counts[folder if "." not in folder else "(files)"] += count_lines(file.read_text(encoding="utf-8"))
    for folder, count in counts.most_common():
        print(f"{folder:<12}{count:>7,}")
    print(f"{'total':<12}{counts.total():>7,}")
    imports = {name: {*imported_by(name)} - {name} for name in MODULES}
    reached = {name: reach(name, imports) for name in MODULES}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in MODULES}
    circles -= {frozenset()}
    print(f"circles of files: {len(circles)} ({', '.join(f'{len(circle)} files' for circle in circles)})")
    upward = [
        f"{name} imports {other}"
        for name in sorted(MODULES)
        for other in sorted(imports[name])
        if (own := folder_of(name)) and (target := folder_of(other)) not in ("", own)
        if target not in ORDER[: ORDER.index(own)]
    ]
    print("\n  ".join([f"upward imports: {len(upward)}", *upward]))


if __name__ == "__main__":
    main()
