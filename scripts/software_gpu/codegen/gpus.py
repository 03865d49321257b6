"""The properties of GPUs that Inductor and Triton ask for when they generate code."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU. The figures are those of its driver, as in `runtime/devices.c`; the names of the
    fields after `name` are those of torch's device properties."""

    key: str
    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    total_memory: int
    shared_memory_per_block: int = 48 * KIB
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    """The architecture of an AMD GPU."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.major, self.minor

    @property
    def architecture(self) -> str:
        """The name that ptxas has for this GPU: "sm_90"."""
        return f"sm_{self.major}{self.minor}"


GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        Gpu(
            "a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 164 * KIB, 163 * KIB, 40 * MIB, 81152 * MIB
        ),
        Gpu(
            "h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 228 * KIB, 227 * KIB, 50 * MIB, 81079 * MIB
        ),
        Gpu("b200", "NVIDIA B200", 10, 0, 148, 228 * KIB, 227 * KIB, 126 * MIB, 182642 * MIB),
    )
}
