"""Everything that can be measured, by the name that ``--against`` takes. One small adapter each."""

from __future__ import annotations

from moeloom.bench.rivals.base import Rival
from moeloom.bench.rivals.cublas_dense import CublasDense
from moeloom.bench.rivals.deepep import DeepEP
from moeloom.bench.rivals.hybridep import HybridEP
from moeloom.bench.rivals.liger import Liger
from moeloom.bench.rivals.moeloom_backend import MoeloomBackend
from moeloom.bench.rivals.nccl_all_to_all import NcclAllToAll
from moeloom.bench.rivals.sonicmoe import SonicMoE
from moeloom.bench.rivals.transformers_experts import TransformersExperts
from moeloom.errors import ArgumentError, complain

RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        MoeloomBackend("hopper"),
        MoeloomBackend("torch"),
        MoeloomBackend("reference"),
        SonicMoE(),
        TransformersExperts(),
        Liger(),
        CublasDense(),
        NcclAllToAll(),
        DeepEP(),
        HybridEP(),
    )
}


def find_rivals(names: list[str]) -> list[Rival]:
    """Return rivals by their names.

    Raises:
        ArgumentError: an unknown name, or one given twice.
    """
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise ArgumentError(complain("--against", f"be among {', '.join(RIVALS)}", repr(unknown[0]), "Fix the name."))
    if len(set(names)) != len(names):
        raise ArgumentError(complain("--against", "name each rival once", ",".join(names), "Leave one out."))
    return [RIVALS[name] for name in names]
