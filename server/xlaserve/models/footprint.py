"""What XLA's compiler says that one program takes on each of its devices. Needs no JAX."""

from dataclasses import dataclass
from typing import Protocol


class _Statistics(Protocol):
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


class _Compiled(Protocol):
    def memory_analysis(self) -> _Statistics | None: ...


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each device, as the memory analysis of a compiled program has them."""

    arguments_bytes: int = 0
    """Parameters and inputs, in the layout of the device."""
    outputs_bytes: int = 0
    aliased_bytes: int = 0
    """Of the outputs, what lies in the memory of arguments."""
    temporaries_bytes: int = 0
    code_bytes: int = 0
    """With the constants; 0 where the compiler does not say, as on the CPU."""

    @staticmethod
    def of(executable: _Compiled) -> "Footprint":
        """Return what the compiler says; zeros where it says nothing."""
        found = executable.memory_analysis()
        if found is None:
            return Footprint()
        return Footprint(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
            # -1 where it is not known.
            max(0, found.generated_code_size_in_bytes),
        )

    def scratch_bytes(self, parameters_bytes: int) -> int:
        """Return what each execution takes besides parameters of this size."""
        scratch = self.temporaries_bytes + self.outputs_bytes + self.arguments_bytes
        return max(0, scratch - self.aliased_bytes - parameters_bytes)
