"""The shape of the tree: imports point one way, importing is quick and touches no GPU, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeloom"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 800, 150

#: Rooms from the ground up; a module may import its own room and those before it.
ROOMS = (
    ("version", "errors"),
    ("toolchain",),
    ("compat",),
    ("emulator",),
    ("config",),
    ("schedule", "numerics"),
    ("kernels",),
    ("runtime",),
    ("backends.call",),
    ("backends.torch",),
    ("backends.hopper",),
    ("backends.reference",),
    ("backends",),
    ("ops",),
    ("validation",),
    ("functional", "router"),
    ("layer",),
    ("gradients",),
    ("train",),
    ("bench",),
    ("compile",),
    ("cli",),
    ("__main__",),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(name: str) -> int:
    found = [i for i, room in enumerate(ROOMS) for member in room if name == member or name.startswith(member + ".")]
    assert found, f"moeloom.{name} belongs to no room; add it to ROOMS and to DESIGN.md"
    return min(found)


def imported(path: Path) -> set[str]:
    """Names of moeloom modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{a.name}" for a in node.names} | {node.module}
    modules = {module_name(f) for f in FILES}
    stripped = {n.removeprefix("moeloom.") for n in names if n.startswith("moeloom.")}
    return {n for n in stripped if n in modules}


@pytest.mark.parametrize("path", [f for f in FILES if module_name(f)], ids=module_name)
def test_imports_point_down(path):
    here = module_name(path)
    for there in imported(path):
        package = there == "backends" and here.startswith("backends.")
        assert package or floor(there) <= floor(here), f"moeloom.{here} imports moeloom.{there}, which lies above it"


def test_the_emulator_needs_nothing_of_the_project_but_compat():
    for path in (SOURCE / "emulator").rglob("*.py"):
        others = {n for n in imported(path) if n != "compat" and not n.startswith("emulator")}
        assert not others, f"{path.name} imports {others}"


def test_the_reference_knows_no_kernels():
    for path in (SOURCE / "backends" / "reference").glob("*.py"):
        assert "triton" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < MAX_FUNCTION, node.name


def public_definitions():
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield f"{module_name(path)}.{node.name}", node
                if isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                            yield f"{module_name(path)}.{node.name}.{inner.name}", inner


def test_everything_public_is_documented():
    bare = [name for name, node in public_definitions() if not ast.get_docstring(node)]
    assert not bare
    assert not [module_name(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_brings_neither_torch_nor_triton():
    out = python(
        "import sys, moeloom; print(moeloom.__version__, [m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    assert out.split(maxsplit=1)[1].strip() == "[]"


def test_use_brings_no_triton_and_no_cuda():
    code = "import sys, moeloom, torch; l = moeloom.MoE(4, 4, 2, 1); l(torch.zeros(2, 4)).sum().backward();"
    assert python(code + "print('triton' in sys.modules, torch.cuda.is_initialized())").split() == ["False", "False"]


def test_public_names():
    import moeloom

    for name in moeloom.__all__:
        assert getattr(moeloom, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Moe'"):
        moeloom.Moe  # noqa: B018
    with pytest.raises(ImportError):
        from moeloom import nonsense  # noqa: F401


def test_ruff():
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
