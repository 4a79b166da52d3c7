"""The rules that keep the source readable: who imports whom, what is private, how long, how named."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
RUNTIME = ROOT / "runtime" / "zero_runtime"
COMPILER = ROOT / "zero_compile"
PASSES = COMPILER / "passes"
FOLDERS = (COMPILER, RUNTIME.parent, *(ROOT / n for n in ("tools", "bench", "examples", "tests")))

#: What each layer must not import. Whoever is above it may import it, never the other way round.
FORBIDDEN_IMPORTS: Mapping[Path, frozenset[str]] = {
    RUNTIME: frozenset({"zero_compile", "tools", "bench", "examples", "tests"}),
    COMPILER: frozenset({"tools", "bench", "examples", "tests"}),
    ROOT / "tools": frozenset({"bench", "examples", "tests"}),
}

#: Every room, and every module that stands in none: each may import what is above it here, and itself.
ROOMS = (
    "zero_runtime.errors",
    "zero_runtime.compat",
    "zero_runtime.notices",
    "zero_runtime.ir",
    "zero_runtime.memory",
    "zero_runtime.comm",
    "zero_runtime.offload",
    "zero_runtime.sharding",
    "zero_runtime.recorder",
    "zero_runtime.session",
    "zero_runtime.executor",
    "zero_runtime.module_hook",
    "zero_runtime.optim",
    "zero_runtime.eager",
    "zero_runtime.lion",
    "zero_runtime.native",
    "zero_runtime.swap",
    "zero_compile.bucketing",
    "zero_compile.tiling",
    "zero_compile.config",
    "zero_compile.analysis",
    "zero_compile.scheduler",
    "zero_compile.simulator",
    "zero_compile.passes",
    "zero_compile.verify",
    "zero_compile.emit_plan",
    "zero_compile.pipeline",
    "zero_compile.capture",
    "zero_compile.lowering",
    "zero_compile.backend",
    "zero_compile.api",
    "zero_compile.construction",
    "zero_compile.deepspeed",
)

#: Rooms of the compiler that know the runtime by its plans and operators only.
BEFORE_CAPTURE = ROOMS[ROOMS.index("zero_compile.bucketing") : ROOMS.index("zero_compile.capture")]
SHARED = ("zero_runtime.errors", "zero_runtime.compat", "zero_runtime.ir")

MAX_FILES_IN_A_ROOM = 15

#: PyTorch's stable C++ interface, POSIX, Linux, Python and the standard library: no other header.
ALLOWED_INCLUDE = re.compile(
    r"torch/(csrc/stable|headeronly)/[\w/]+\.h|Python\.h|(sys|linux)/\w+\.h|[a-z]\w*(\.h)?"
)

#: What the extension that is tied to one version of PyTorch includes beside that.
TIED_INCLUDES = {"c10/core/StorageImpl.h", "torch/version.h"}

#: The one file that may use private names of torch, because they differ between its versions.
COMPAT = RUNTIME / "compat.py"

#: Private names that may stand elsewhere: the documented means to write tensor subclasses, and the
#: type of an operator in a graph.
ALLOWED_PRIVATE = frozenset(
    {
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._disabled_torch_function_impl",
        "torch._ops.OpOverload",
        "torch.Tensor._make_wrapper_subclass",
    }
)

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600

#: Files among the passes that hold what several passes share.
PASS_HELPERS = frozenset({"__init__", "insert"})


class Import(NamedTuple):
    """``from module import name`` (``name`` empty for ``import module``), bound to ``alias``."""

    module: str
    name: str
    alias: str
    line: int

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def product_files() -> list[Path]:
    return python_files(COMPILER, RUNTIME)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def module_name(path: Path) -> str:
    base = RUNTIME.parent if path.is_relative_to(RUNTIME) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(path: Path, nodes: Iterator[ast.AST]) -> Iterator[Import]:
    package = module_name(path).split(".")
    if path.stem != "__init__":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.split(".")[0]
                yield Import(name.name, "", bound, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                yield Import(module, name.name, name.asname or name.name, node.lineno)


def all_imports(path: Path) -> list[Import]:
    return list(imports_in(path, ast.walk(tree_of(path))))


# ------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("layer", FORBIDDEN_IMPORTS, ids=lambda path: path.name)
def test_imports_run_one_way(layer: Path) -> None:
    wrong = [
        f"{place(path, found.line)} imports {found.target}"
        for path in python_files(layer)
        for found in all_imports(path)
        if found.module.split(".")[0] in FORBIDDEN_IMPORTS[layer]
    ]
    assert not wrong, "\n".join(wrong)


def test_csrc_includes_only_the_stable_interface_of_torch() -> None:
    sources = [p for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in (".h", ".cpp")]
    assert sources
    wrong = []
    for path in sources:
        for line, text in enumerate(path.read_text().splitlines(), start=1):
            angled = re.match(r"\s*#\s*include\s*<([^>]+)>", text)
            quoted = re.match(r'\s*#\s*include\s*"([^"]+)"', text)
            tied = path.parent.name == "storage" and angled and angled[1] in TIED_INCLUDES
            if angled and not tied and not ALLOWED_INCLUDE.fullmatch(angled[1]):
                wrong.append(f"{place(path, line)} includes <{angled[1]}>")
            if quoted and not (path.parent / quoted[1]).is_file():
                wrong.append(f'{place(path, line)} includes "{quoted[1]}", which is not its own')
    assert not wrong, "\n".join(wrong)


def needs_by_module() -> dict[str, dict[str, int]]:
    """For each module of the product the others that it imports, anywhere in it, and in which line."""
    modules = {module_name(path): path for path in product_files()}
    needs: dict[str, dict[str, int]] = {}
    for name, path in modules.items():
        found = {i.target if i.target in modules else i.module: i.line for i in all_imports(path)}
        needs[name] = {m: line for m, line in found.items() if m in modules and m != name}
    return needs


def room_of(module: str) -> str:
    return next((r for r in ROOMS if module == r or module.startswith(f"{r}.")), "")


def test_no_import_cycles() -> None:
    try:
        list(TopologicalSorter(needs_by_module()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_module_has_its_room() -> None:
    packages = {"zero_compile", "zero_runtime"}
    assert not [m for m in needs_by_module() if not room_of(m) and m not in packages]


def test_rooms_import_what_is_above_them_in_the_table() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in needs_by_module().items()
        for target in targets
        if room_of(module) and room_of(target)
        if ROOMS.index(room_of(target)) > ROOMS.index(room_of(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_compiler_knows_the_runtime_by_plans_and_operators() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in needs_by_module().items()
        for target in targets
        if room_of(module) in BEFORE_CAPTURE and target.startswith("zero_runtime.")
        if room_of(target) not in SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_plans_and_operators_need_no_other_room() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in needs_by_module().items()
        for target in targets
        if room_of(module) == "zero_runtime.ir" and room_of(target) not in SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_is_crowded() -> None:
    folders = {path.parent for path in product_files()}
    crowds = {
        f"{folder.relative_to(ROOT)} has {count} files"
        for folder in folders
        if (count := len([*folder.glob("*.py")]) - 1) > MAX_FILES_IN_A_ROOM
        if folder != PASSES  # one pass a file
    }
    assert not crowds


# ------------------------------------------------------------------------------ torch


def torch_aliases(path: Path) -> dict[str, str]:
    """Local names for torch and things in it: ``{"torch": "torch", "nn": "torch.nn", ...}``."""
    return {
        found.alias: "torch" if found.alias == "torch" else found.target
        for found in all_imports(path)
        if found.target.split(".")[0] == "torch"
    }


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str | None:
    """``nn.Module`` as ``torch.nn.Module``; None for what does not begin at a name of torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def changed_by(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a node assigns, deletes or sets by name."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        yield ast.Attribute(node.args[0], "<by name>", ast.Store(), lineno=node.lineno)


def replaced(path: Path) -> Iterator[str]:
    """``file:line name`` for each attribute of torch that the file changes."""
    aliases = torch_aliases(path)
    for node in ast.walk(tree_of(path)):
        for attribute in changed_by(node):
            name = dotted(attribute, aliases)
            if name:
                yield f"{place(path, attribute.lineno)} {name}"


def test_no_attribute_of_torch_is_replaced() -> None:
    wrong = [line for path in product_files() for line in replaced(path)]
    assert not wrong, "\n".join(wrong)


def is_private(name: str) -> bool:
    """Whether a dotted name passes through a private one. Operators are public, however named."""
    if name.startswith("torch.ops."):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(path: Path) -> set[str]:
    """``file:line name`` for each private name of torch that the file uses and may not."""
    aliases = torch_aliases(path)
    imported = [(i.target, i.line) for i in all_imports(path) if i.module.split(".")[0] == "torch"]
    # The outermost attribute of a chain holds the whole name; the inner ones are parts of it.
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in nodes}
    used = [(dotted(n, aliases), n.lineno) for n in nodes if id(n) not in inner]
    return {
        f"{place(path, line)} {name}"
        for name, line in [*imported, *used]
        if name and is_private(name) and not _is_allowed(name)
    }


def _is_allowed(name: str) -> bool:
    return any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED_PRIVATE)


def test_private_names_of_torch_stand_in_one_file() -> None:
    wrong = sorted(n for path in product_files() if path != COMPAT for n in private_names(path))
    assert not wrong, f"move to {COMPAT.relative_to(ROOT)}:\n" + "\n".join(wrong)


# ------------------------------------------------------------------------------ size


def snapshot_lines(node: ast.AST) -> int:
    """Lines of the texts that a test passes to a call to compare with: data, not code."""
    texts = (
        argument
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )
    return sum((text.end_lineno or text.lineno) - text.lineno for text in texts)


def test_functions_are_short() -> None:
    wrong = []
    for path in python_files(*FOLDERS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - snapshot_lines(node)
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{place(path, node.lineno)} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    lengths = {
        path: len(path.read_text().splitlines())
        for path in [*python_files(*FOLDERS), *(ROOT / "csrc").rglob("*.*")]
    }
    for path in python_files(*FOLDERS):
        lengths[path] -= snapshot_lines(tree_of(path))
    wrong = [f"{place(p, 1)} has {n} lines" for p, n in lengths.items() if n > MAX_FILE_LINES]
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------ names and docstrings


def pass_names() -> list[str]:
    return sorted({path.stem for path in PASSES.glob("*.py")} - PASS_HELPERS)


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_is_named_like_its_file(name: str) -> None:
    functions = [n for n in tree_of(PASSES / f"{name}.py").body if isinstance(n, ast.FunctionDef)]
    assert name in [function.name for function in functions]


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_has_a_test_file_named_like_it(name: str) -> None:
    assert (ROOT / "tests" / "passes" / f"test_{name}.py").is_file()


def public_definitions(
    path: Path,
) -> Iterator[ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and the public methods of its public classes."""
    pending: list[ast.stmt] = list(tree_of(path).body)
    while pending:
        node = pending.pop()
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                pending += node.body


def test_whatever_is_public_has_a_docstring() -> None:
    """A name that a module defines several times (an interface and its forms) needs one of them."""
    wrong = []
    for path in product_files():
        if not ast.get_docstring(tree_of(path)):
            wrong.append(f"{place(path, 1)} the module")
        definitions = list(public_definitions(path))
        explained = {node.name for node in definitions if ast.get_docstring(node)}
        wrong += [
            f"{place(path, n.lineno)} {n.name}" for n in definitions if n.name not in explained
        ]
    assert not wrong, "\n".join(wrong)
