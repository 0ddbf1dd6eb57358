"""``moeloom compile``: its reading of PTX, its check of order, its gates; and all kernels under old and new Triton."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeloom import compat
from moeloom.cli import compile as command
from moeloom.compile import inspection, order, partitions, ptx, report, runner, targets, versions
from moeloom.errors import ArgumentError, ToolchainError

KERNELS = Path(__file__).with_name("order_kernels.py")
TRITON = versions.installed()
needs_triton = pytest.mark.skipif(TRITON is None, reason="triton is not installed")


def fetches(test):
    """Mark a test that needs two Triton versions, of which one may have to be downloaded."""
    return pytest.mark.slow(needs_triton(pytest.mark.timeout(1200)(test)))


def kernel(body: str, warps: int = 4) -> str:
    return f".version 8.7\n.target sm_90a\n.visible .entry k(\n\t.param .u64 k_param_0\n)\n.reqntid {32 * warps}\n{{\n{body}\n\tret;\n}}\n"


# ---------------------------------------------------------------------------------------------------------- reading PTX


def test_reading_keeps_lines_guards_and_places_in_python():
    text = (
        kernel(
            "\t.reg .b32 %r<3>;\n.loc 1 60 5, function_name $L__info0, inlined_at 1 88 9\n"
            '\t@%p1 st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 }; // says ; and { and "\n\tmov.b64 {_, %r2}, %rd1; nanosleep.u32 4;'
        )
        + '\t.file 1 "/a//b" "sync.py"\n\t.section .debug_x\n\t{\n.b8 1\n.b8 2\n\t}\n'
    )
    (function,) = ptx.read(text)
    code = [i for block in function.blocks for i in block.instructions]
    # The last one stands for the end of the text.
    assert [i.name for i in code] == ["st.global.v2.b32", "mov.b64", "nanosleep.u32", "ret", "ret"]
    store = code[0]
    assert (store.line, store.guard, store.operands) == (10, "%p1", "[ %rd1 + 0 ], { %r1, %r2 }")
    assert text.splitlines()[store.line - 1].lstrip().startswith("@%p1")
    assert store.source == "sync.py:60 in sync.py:88"
    assert function.threads == 128 and function.is_kernel


def test_labels_of_inline_assembly_are_its_own():
    wait = "{\n.reg .pred done;\nwaitLoop:\n mbarrier.try_wait.parity.shared.b64 done, [%r1], 0;\n @!done bra.uni waitLoop;\n}\n"
    (function,) = ptx.read(kernel(wait + "mov.b32 %r1, 1;\n" + wait))
    loops = [n for n, b in enumerate(function.blocks) if n in b.successors]
    assert len(loops) == 2


def test_branch_tables_lead_to_all_their_targets():
    text = kernel("brx.idx %r1, T;\nA: ret;\nB: ret;\nT: .branchtargets A,\n B,\n A;")
    (function,) = ptx.read(text)
    targets_of = function.blocks[0].successors
    assert len(targets_of) == 3 and targets_of[0] == targets_of[2] != targets_of[1]


@pytest.mark.parametrize("body", ["bra NOWHERE;", "brx.idx %r1, NO_TABLE;", "12: ret;"])
def test_what_is_not_understood_is_an_error(body):
    with pytest.raises(ptx.PtxError):
        ptx.read(kernel(body))
    with pytest.raises(ptx.PtxError):
        ptx.read(kernel("ret;")[:-3])


# ------------------------------------------------------------------------------------------------------- check of order

STORE = "st.global.b32 [%rd1], %r1;\n"
BULK = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r1}], [%r2];\ncp.async.bulk.commit_group;\n"
WAIT, READ, PROXY = "cp.async.bulk.wait_group 0;\n", "cp.async.bulk.wait_group.read 0;\n", "fence.proxy.async;\n"
BAR, RELEASE = "bar.sync 0, 128;\n", "@%p1 red.global.gpu.release.add.u32 [%rd2], 1;\n"
LOAD = "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r1, %r1}], [%r3];\n"
POLL = "@%p1 ld.global.gpu.relaxed.b32 %r1, [%rd2];\n"
FENCE, RELAXED = "fence.acq_rel.gpu;\n", "@%p1 red.global.gpu.relaxed.add.u32 [%rd2], 1;\n"
ORDERS = {
    "store, barrier": (STORE + BAR + RELEASE, ""),
    "store": (STORE + RELEASE, "a store may come before it"),
    "store to shared memory": ("st.shared.b32 [%r1], 1;\nst.local.b32 [%r1], 1;\n" + RELEASE, ""),
    "store with no state space": ("st.b32 [%rd1], 1;\n" + RELEASE, "a store may come before it"),
    "relaxed atomic": (RELAXED + RELEASE, "a store may come before it"),
    "barrier before the store": (BAR + STORE + RELEASE, "a store may come before it"),
    "barrier under a guard": (STORE + "@%p2 " + BAR + RELEASE, "a store may come before it"),
    "barrier of half the threads": (STORE + "bar.sync 0, 64;\n" + RELEASE, "a store may come before it"),
    "barrier that is only arrived at": (STORE + "barrier.arrive 0, 128;\n" + RELEASE, "a store may come before it"),
    "barrier of single warps": (STORE + "bar.warp.sync -1;\n" + RELEASE, "a store may come before it"),
    "barrier on one of two paths": (STORE + "@%p2 bra L;\n" + BAR + "L:\n" + RELEASE, "a store may come before it"),
    "barriers on both paths": (STORE + "@%p2 bra L;\n" + BAR + "bra M;\nL:\n" + BAR + "M:\n" + RELEASE, ""),
    "store behind the release in a loop": (BAR + "L:\n" + RELEASE + STORE + "@%p2 bra L;\n", "a store may come before it"),
    "loop with its barrier": ("L:\n" + BAR + RELEASE + STORE + "@%p2 bra L;\n", ""),
    "atomic that acquires and releases": (STORE + "atom.global.acq_rel.gpu.add.u32 %r1, [%rd1], 1;\n", "a store may come before it"),
    "release of shared memory": (STORE + "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];\nred.shared.release.cta.add.u32 [%r1], 1;\n", ""),
    "called function": ("call.uni f, ();\n" + RELEASE, "a store may come before it"),
    "bulk store, all": (BULK + WAIT + PROXY + BAR + RELEASE, ""),
    "bulk store, no commit": (BULK.split("\n")[0] + "\n" + WAIT + PROXY + BAR + RELEASE, "no commit_group"),
    "bulk store, no wait": (BULK + PROXY + BAR + RELEASE, "completion is not waited for"),
    "bulk store, wait under a guard": (BULK + "@%p1 " + WAIT + PROXY + BAR + RELEASE, "completion is not waited for"),
    "bulk store, reading waited for": (BULK + READ + PROXY + BAR + RELEASE, "wait_group.read"),
    "bulk store, one left in flight": (BULK + WAIT.replace("0", "1") + PROXY + BAR + RELEASE, "leaves in flight"),
    "bulk store, no proxy fence": (BULK + WAIT + BAR + RELEASE, "no fence.proxy.async"),
    "bulk store, fence for shared memory only": (BULK + WAIT + "fence.proxy.async.shared::cta;\n" + BAR + RELEASE, "no fence.proxy.async"),
    "bulk store, fence for global memory": (BULK + WAIT + "fence.proxy.async.global;\n" + BAR + RELEASE, ""),
    "bulk store, no barrier": (BULK + WAIT + PROXY + RELEASE, "no barrier of the partition behind the fence"),
    "bulk store, fence behind the barrier": (BULK + WAIT + BAR + PROXY + RELEASE, "no barrier of the partition behind the fence"),
    "bulk store, wait behind the barrier": (BULK + PROXY + BAR + WAIT + RELEASE, "no fence.proxy.async"),
    "bulk reduction": (BULK.replace("cp.async", "cp.reduce.async", 1) + RELEASE, "completion is not waited for"),
    "fence, relaxed atomic": (STORE + FENCE + RELAXED, "with stores in front of the fence"),
    "barrier, fence, relaxed atomic": (STORE + BAR + FENCE + RELAXED, ""),
    "poll, all": (POLL + FENCE + BAR + PROXY + LOAD, ""),
    "poll, no proxy fence": (POLL + FENCE + BAR + LOAD, "no fence.proxy.async between"),
    "poll, no barrier": (POLL + FENCE + PROXY + LOAD, "an acquire of some threads only"),
    "poll, no barrier before a plain load": (POLL + FENCE + "ld.global.b32 %r1, [%rd1];\n", "an acquire of some threads only"),
    "poll, no barrier before a store": (POLL + FENCE + STORE, "an acquire of some threads only"),
    "poll by all threads": (POLL.removeprefix("@%p1 ") + FENCE + "ld.global.b32 %r1, [%rd1];\n", ""),
    "acquire of one thread": ("@%p1 ld.global.gpu.acquire.b32 %r1, [%rd2];\nld.global.b32 %r2, [%rd1];\n", "an acquire of some threads only"),
    "load of what nobody publishes": (LOAD, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_order(name):
    body, expected = ORDERS[name]
    found = order.check(kernel(body)).violations
    assert bool(found) == bool(expected), found
    assert not found or expected in found[0].why


def test_a_violation_names_both_places():
    (found,) = order.check(kernel("mov.b32 %r1, 1;\n" + STORE + RELEASE)).violations
    assert (found.line, found.cause_line, found.function) == (10, 9, "k")
    assert "red.global.gpu.release" in str(found) and "line 9" in str(found)


def test_groups_may_be_left_in_flight_only_if_the_kernel_says_so():
    text = kernel(BULK + WAIT.replace("0", "1") + PROXY + BAR + RELEASE)
    assert order.check(text).violations and not order.check(text, pending=1).violations


def test_a_function_does_not_trust_its_caller():
    body = ".func f()\n{\n" + RELEASE + "ret;\n}\n"
    assert {v.cause_line for v in order.check(body).violations} == {0}
    assert not order.check(body.replace(RELEASE, BULK + WAIT + PROXY + WAIT + BAR)).violations


SWITCHES = {
    "comparisons": "setp.eq.b32 %p2, %r10, 1;\n@%p2 bra THREE;\nsetp.ne.b32 %p3, %r10, 2;\n@!%p3 bra ONE;\nbra.uni END;",
    "a range": "add.s16 %rs2, %r10, -3;\nsetp.lt.u16 %p2, %rs2, 9;\n@%p2 bra END;\nsetp.eq.b16 %p3, %r10, 1;\n@%p3 bra THREE;\nbra.uni ONE;",
    "a table": "setp.gt.u32 %p2, %r10, 2;\n@%p2 bra END;\nsetp.gt.s64 %p9, %rd10, 0;\nT: .branchtargets END, THREE, ONE;\nbrx.idx %r10, T;",
}


def specialised(first: str, one: str, three: str, *, switch: str = "comparisons", table: str = "33619969") -> str:
    """A kernel of 4 + 4 warps: partition 1 has three warps, partition 2 has one, unless the table says otherwise."""
    return kernel(
        f"@%p1 bra MAIN;\nbra.uni SWITCH;\nMAIN:\nst.shared.b32 [global_smem+36], {table};\nbarrier.sync 1;\n{first}\n"
        f"barrier.sync 1;\nret;\nSWITCH:\nbarrier.sync 1;\nld.shared.b8 %r10, [%r12+32];\n{SWITCHES[switch]}\n"
        f"THREE:\n{three}\nbra.uni SWITCH;\nONE:\n{one}\nbra.uni SWITCH;\nEND:",
        warps=8,
    )


WARP = STORE + "bar.warp.sync -1;\n" + RELEASE


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(
    "parts, violations",
    [(("", "", ""), 0), (("", WARP, ""), 0), (("", "", WARP), 1), ((WARP, "", ""), 1), ((WARP, WARP, WARP), 2)],
)
def test_a_barrier_of_one_warp_counts_only_for_a_partition_of_one(parts, violations, switch):
    assert len(order.check(specialised(*parts, switch=switch)).violations) == violations


def test_registers_are_followed_only_as_far_as_they_are_known():
    def known(code: str) -> dict[str, int]:
        found = {"%r1": 5}
        partitions._run(ptx.read(kernel(code))[0].blocks[0].instructions[:-1], found)
        return found

    assert known("add.s32 %r2, %r1, -6; shr.u32 %r3, %r2, 31; setp.lt.s32 %p1, %r2, 0;") == {
        "%r1": 5,
        "%r2": -1,
        "%r3": 1,
        "%p1": 1,
    }
    assert known("add.u32 %r2, %r1, -6; setp.lt.u32 %p1, %r2, 0;") == {"%r1": 5, "%r2": 2**32 - 1, "%p1": 0}
    assert known("@%p1 mov.b32 %r1, 3;") == known("mov.b32 %r1, %r9;") == known("popc.b32 %r1, %r1;") == {}


def test_unknown_widths_count_no_barrier_of_one_warp():
    text = specialised("", WARP, "", table="%r77")
    assert {None} in partitions.widths(ptx.read(text)[0]) and len(order.check(text).violations) == 1


# ---------------------------------------------------------------------------------------------------- gates and reports

PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    432 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 13 barriers, 388 bytes smem
"""


def inspected(tmp_path, monkeypatch, *, said=PTXAS, shared=100, sass="HGMMA.64x64x16.F32.BF16 R1", text=None, **spec):
    monkeypatch.setattr(inspection.Tools, "disassemble", lambda self, cubin: sass)
    made = inspection.Compiled(
        tmp_path / "k", text or kernel("wgmma.mma_async.sync.aligned.m64n64k16 {%f1}, 1;"), said, shared, 4
    )
    return inspection.inspect(made, targets.KernelSpec("k", None, {}, **spec), "90a", inspection.Tools([]))


def test_ptxas_is_read():
    found = inspection.read_ptxas(PTXAS)
    assert found == dict(registers=168, named_barriers=13, stack_bytes=432, spill_bytes=40)
    assert set(inspection.read_ptxas("").values()) == {None}


def test_gates(tmp_path, monkeypatch):
    def problems(**change):
        return "; ".join(inspected(tmp_path, monkeypatch, **change).problems)

    fine = PTXAS.replace("16 bytes", "0 bytes").replace("24 bytes", "0 bytes")
    assert problems(said=fine, tensor_core="HGMMA") == ""
    assert problems() == "40 bytes of registers are spilled"
    version = ".".join(map(str, compat.TRITON_VERSION[:2]))
    assert problems(known_spills={version: 40}) == ""
    for known in ({version: 39}, {"2.0": 40}):
        assert problems(known_spills=known) == "40 bytes of registers are spilled"
    assert problems(said="") == "ptxas did not say what it used"
    assert problems(said=fine, shared=227 * 1024) == ""
    assert "a CTA can have 232448" in problems(said=fine, shared=227 * 1024 + 1)
    assert problems(said=fine, tensor_core="QGMMA") == "no QGMMA"
    assert problems(said=fine, tensor_core={"90a": "QGMMA"}) == "no QGMMA"
    assert problems(said=fine, tensor_core={"100a": "UTCHMMA"}) == ""
    # Without a disassembler PTX must show the instruction.
    assert problems(said=fine, tensor_core="HGMMA", sass=None) == ""
    assert problems(said=fine, tensor_core="UTCHMMA", sass=None) == "no tcgen05.mma"
    assert problems(said=fine, text=kernel(STORE + RELEASE)) == "1 place where the order of memory does not hold"
    assert "could not be read" in problems(said=fine, text=kernel("bra NOWHERE;"))


@pytest.mark.parametrize("problems, code", [([], 0), (["no HGMMA"], 1)])
def test_exit_code_and_json(tmp_path, monkeypatch, capsys, problems, code):
    result = dict(kernel="k", architecture="90a", triton="3.6.0", key="k", seconds=1.0, threads=128, registers=10,
                  spill_bytes=0, shared_bytes=4, sass={"HGMMA": 4}, ptx={}, releases=1, barriers=2, problems=problems,
                  violations=["PTX line 7: late"] * bool(problems), notes=["old nvdisasm"])  # fmt: skip
    monkeypatch.setattr(runner, "run", lambda request: [result])
    monkeypatch.setattr(versions, "resolve", lambda name, say: versions.Toolchain("3.6.0"))
    out = tmp_path / "out.json"
    assert (
        command.run(kernels=[], architectures="90a", triton="installed", json_path=str(out), keep=None, jobs=None)
        == code
    )
    assert json.loads(out.read_text()) == [result]
    said = capsys.readouterr().out
    assert (
        "4 HGMMA" in said
        and ("no problem" in said) == (not problems)
        and ("PTX line 7: late" in said) == bool(problems)
    )


def test_nothing_checked_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(versions, "installed", lambda: None)
    call = dict(kernels=[], architectures="90a", json_path=None, keep=None, jobs=None)
    assert command.run(triton="installed", **call) == 2
    assert "Nothing was checked" in capsys.readouterr().err
    monkeypatch.setattr(versions, "resolve", lambda name, say: versions.Toolchain("3.6.0"))
    monkeypatch.setattr(runner, "run", lambda request: [])
    assert command.run(triton="installed", **call) == 2
    for change in (
        dict(architectures="80"),
        dict(kernels=["nonsense"]),
        dict(kernels=["nowhere.py:SPECS"]),
        dict(jobs=0),
    ):
        with pytest.raises(ArgumentError):
            command.run(triton="installed", **(call | change))


# ------------------------------------------------------------------------------------------------------ Triton versions


def test_versions_are_found_and_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(versions, "installed", lambda: versions.Toolchain("3.6.0"))
    said, calls = [], []

    def pip(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--target") + 1])
        (folder / "triton-3.9.0.dist-info").mkdir(parents=True)
        (folder / "triton").mkdir()
        (folder / "triton" / "__init__.py").write_text("")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(versions.subprocess, "run", pip)
    assert versions.resolve("3.6.0", said.append).folder is None and not calls
    assert versions.resolve("3.9.0", said.append) == versions.Toolchain("3.9.0", tmp_path / "triton" / "3.9.0")
    assert "1048 MB on disk" in said[0] and calls[0][-1] == "triton==3.9.0" and "--no-deps" in calls[0]
    assert versions.resolve("3.9.0", said.append) and len(calls) == len(said) == 1
    assert versions.resolve(str(tmp_path / "triton" / "3.9.0"), said.append).version == "3.9.0"
    with pytest.raises(ArgumentError, match="--triton must be"):
        versions.resolve(str(tmp_path), said.append)
    monkeypatch.setattr(
        versions.subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 1, "", "no such release")
    )
    with pytest.raises(ToolchainError, match="3.7.1 could not be fetched: no such release"):
        versions.resolve("3.7.1", said.append)
    assert not list((tmp_path / "triton").glob("*.part"))
    for name in ("3.5.0", "3.10.0", "nonsense"):
        with pytest.raises(ToolchainError, match=f"triton must be >= 3.6 and < 3.10 for moeloom's kernels; got {name}"):
            versions.resolve(name, said.append)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ToolchainError, match="wheels for Linux only"):
        versions.resolve("3.7.1", said.append)


def test_only_compat_imports_triton():
    source = Path(order.__file__).parents[1]
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            if any((name or "").split(".")[0] == "triton" for name in names):
                found.add(str(path.relative_to(source)))
    assert found == {"compat.py"}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_compat_refuses_a_missing_or_foreign_triton():
    missing = python("import sys; sys.modules['triton'] = None; import moeloom.compat")
    assert "ToolchainError: triton must be importable" in missing
    foreign = python(
        "import sys, types; t = types.ModuleType('triton'); t.__version__ = '3.5.1'; sys.modules['triton'] = t; import moeloom.compat"
    )
    assert "triton must be >= 3.6 and < 3.10 for moeloom's kernels; got 3.5.1" in foreign


# -------------------------------------------------------------------------------------------------------- real compilers


def toolchain(name: str) -> versions.Toolchain:
    try:
        return versions.resolve(name, print)
    except ToolchainError as error:
        pytest.skip(str(error))


def compiled(selectors: list[str], *names: str, architectures=("90a",), keep=None) -> dict[tuple[str, str, str], dict]:
    chains = list(dict.fromkeys(toolchain(name) for name in names))
    found = runner.run(runner.Request(selectors, list(architectures), chains, keep))
    return {(r["kernel"], r["architecture"], r["triton"]): r for r in found}


@needs_triton
def test_kernels_are_built_and_checked(tmp_path):
    """One of ours, and the example of docs/compile.md."""
    page = (Path(__file__).parent.parent / "docs" / "compile.md").read_text()
    (example,) = (block for block in page.split("```python\n")[1:] if "SPECS" in block)
    file = tmp_path / "mine.py"
    file.write_text(example.split("```")[0])
    found = compiled(["handshake", f"{file}:SPECS"], "installed", keep=tmp_path / "kept")
    assert {key[:2] for key in found} == {("handshake", "90a"), ("scale", "90a")}
    assert all(r["problems"] == [] and "error" not in r for r in found.values())
    result = found["handshake", "90a", TRITON.version]
    assert (result["releases"], result["bulk_stores"], result["bulk_loads"], result["threads"]) == (3, 1, 1, 256)
    assert result["registers"] > 0 and result["spill_bytes"] == 0 and result["sass"] == {}
    assert {p.suffix for p in (tmp_path / "kept" / TRITON.version).iterdir()} == {".ptx", ".cubin", ".sass", ".ttgir"}


#: From 3.9 on the compiler puts a barrier in front of each release by itself.
CURED_IN_3_9 = {"plain/none", "plain/loop", "plain/branch", "bulk/late fence", "roles/-bb", "roles/b-b", "roles/bb-"}


@fetches
@pytest.mark.parametrize("name", ["3.6.0", "newest"])
def test_kernels_that_release_wrongly_are_found(name):
    lists = [f"{KERNELS}:{which}" for which in ("GOOD", "BAD", "GATES")]
    found = {r["kernel"]: r for r in compiled(lists, name).values()}
    from tests.order_kernels import BAD, GOOD

    new = tuple(map(int, toolchain(name).version.split(".")[:2])) >= (3, 9)
    for spec in GOOD:
        assert found[spec.name]["problems"] == [], spec.name
    for spec in BAD:
        cured = new and spec.name in CURED_IN_3_9
        assert len(found[spec.name].get("violations", [])) == (0 if cured else 1), spec.name
        assert found[spec.name]["problems"] == ([] if cured else ["1 place where the order of memory does not hold"])
    assert found["product/right"]["problems"] == found["bulk/pending allowed"]["problems"] == []
    assert found["product/right"]["sass"]["HGMMA"] == found["product/right"]["ptx"]["wgmma.mma_async"] == 4
    assert found["product/other"]["problems"] == ["no QGMMA"]
    assert found["heavy/fits"]["problems"] == [] and "spilled" in found["heavy/spills"]["problems"][0]
    assert "power of 2" in found["heavy/unknown"]["error"]
    assert "name ['COUNT', 'date']; the kernel takes ['data', 'COUNT']" in found["heavy/misnamed"]["error"]


WORDS = ("bar", "atom", "red", "fence", "mbarrier", "cp", "ld", "st")


def written(folder: Path, name: str) -> list[str]:
    """The instructions of a kept kernel that touch global memory or synchronise, without types and operands."""
    (function,) = ptx.read((folder / f"{name}.sm_90a.ptx").read_text())
    code = [i for block in function.blocks for i in block.instructions if i.parts[0] in WORDS]
    keep = [i for i in code if i.parts[0] not in ("ld", "st") or "global" in i.parts]
    drop = ("b32", "b64", "u32", "add", "tensor", "2d", "cta", "bulk_group", "parity")
    return [("@ " if i.guard else "") + ".".join(p for p in i.parts if p not in drop and "::" not in p) for i in keep]


@fetches
@pytest.mark.parametrize("name", ["3.6.0", "newest"])
def test_the_emulator_assumes_what_compilers_write(name, tmp_path):
    """The rows of the table in docs/compile.md."""
    chain = toolchain(name)
    assert len(compiled([f"{KERNELS}:WITNESSES"], name, keep=tmp_path)) == 6
    folder, version = tmp_path / chain.version, tuple(map(int, chain.version.split(".")[:2]))
    bar, proxy, extra = "bar.sync", "fence.proxy.async", ["bar.sync"] * (version >= (3, 9))
    release = "@ red.global.gpu.release" if version >= (3, 9) else "@ atom.global.gpu.release"
    none = written(folder, "plain_none")
    assert none[none.index("st.global") :] == ["st.global"] * none.count("st.global") + [*extra, release]
    read = written(folder, "bulk_read")
    store = ["@ cp.async.bulk.global", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read"]
    expected = [*store, bar, proxy, bar, *extra, release]
    assert read[read.index(store[0]) :][: len(expected)] == expected
    assert ("@ ld.global.gpu.acquire" in written(folder, "fetch_unused")) == (version >= (3, 8))
    relaxed = written(folder, "fetch_relaxed")
    expected = ["@ ld.global.gpu.relaxed", bar, "fence.acq_rel.gpu", bar]
    assert relaxed[relaxed.index(expected[0]) :][:4] == expected
    unfenced = written(folder, "fetch_no fence")
    between = unfenced[unfenced.index("@ ld.global.gpu.acquire") : unfenced.index("@ cp.async.bulk.global")]
    assert proxy not in between and bar in between
    arrive = written(folder, "arrive")
    assert arrive[arrive.index("@ mbarrier.arrive") - 1] == bar


@pytest.mark.slow
@needs_triton
def test_a_crash_costs_one_kernel(tmp_path):
    file = tmp_path / "crash.py"
    file.write_text(
        "import os\nfrom moeloom.compile.targets import KernelSpec\nfrom moeloom.kernels.handshake import handshake\n"
        "class Crash:\n    @property\n    def arg_names(self): os._exit(7)\n"
        "SPECS = [KernelSpec(n, Crash() if n == 'b' else handshake, {}, architectures=('90a',)) for n in 'abc']\n"
    )
    found = {key[0]: r for key, r in compiled([f"{file}:SPECS"], "installed").items()}
    assert [found[n]["problems"] for n in "abc"] == [
        ["does not compile"],
        ["crashes the compiler"],
        ["does not compile"],
    ]
    assert "exit code 7" in found["b"]["error"]
    with pytest.raises(ToolchainError, match="name a list of KernelSpec"):
        compiled([f"{file}:NOTHING"], "installed")


@fetches
def test_every_kernel_under_the_oldest_and_the_newest_triton():
    found = compiled([], "3.6.0", "newest", architectures=tuple(targets.ARCHITECTURES))
    pairs = {(s.name, a) for s in targets.REGISTRY for a in s.architectures}
    assert {(name, a) for name, a, _ in found} == pairs and len(found) == 2 * len(pairs)
    assert report.failed(list(found.values())) == []


def test_names_in_the_registry_are_unique():
    assert len({s.name for s in targets.REGISTRY}) == len(targets.REGISTRY)


@needs_triton
def test_the_registry_names_kernels_that_exist():
    assert all(hasattr(kernel, "arg_names") for _, kernel in targets.load(None))
