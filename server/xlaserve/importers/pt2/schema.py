"""Schema 8 of torch.export's JSON as msgspec structs; unknown fields are errors.

The names are those of `torch/_export/serde/schema.py`. PyTorch's unions, objects with one of many
keys, are structs in which exactly one field is set.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAJOR = 8
"""Major version of the schema. New minor versions add fields, which are rejected as unknown."""

Size: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Device(_Strict):
    """Device of a tensor at export; ignored."""

    type: str
    index: int | None = None


class Hint(_Strict):
    """The value of a symbol for the example inputs."""

    as_int: Size | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class Expression(_Strict):
    """An expression of symbols, as printed by sympy."""

    expr_str: str
    hint: Hint | None = None


class SymInt(_Strict):
    """A size: an integer or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET


class SymFloat(_Strict):
    """A real number: a constant or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class SymBool(_Strict):
    """A boolean: a constant or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class TensorMeta(_Strict):
    """The metadata of a tensor."""

    dtype: int
    sizes: list[SymInt]
    requires_grad: bool
    device: Device
    strides: list[SymInt]
    storage_offset: SymInt
    layout: int


class Named(_Strict):
    """A reference to a tensor of the graph."""

    name: str


class SymIntArgument(_Strict):
    """An integer, or the name of a computed one."""

    as_name: str | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET


class SymFloatArgument(_Strict):
    """A real number, or the name of a computed one."""

    as_name: str | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class SymBoolArgument(_Strict):
    """A boolean, or the name of a computed one."""

    as_name: str | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class OptionalTensor(_Strict):
    """A tensor, or none."""

    as_tensor: Named | UnsetType = UNSET
    as_none: bool | UnsetType = UNSET


class GraphArgument(_Strict):
    """A subgraph."""

    name: str
    graph: "Graph"


class Complex(_Strict):
    """A complex number."""

    real: float
    imag: float


class CustomObject(_Strict):
    """A C++ object, which is stored elsewhere as a pickle."""

    name: str
    class_fqn: str


class Argument(_Strict):
    """An argument, a result, an input or an output: a union with exactly one field set."""

    as_none: bool | UnsetType = UNSET
    as_tensor: Named | UnsetType = UNSET
    as_tensors: list[Named] | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET
    as_ints: list[Size] | UnsetType = UNSET
    as_float: float | str | UnsetType = UNSET
    as_floats: list[float | str] | UnsetType = UNSET
    as_string: str | UnsetType = UNSET
    as_strings: list[str] | UnsetType = UNSET
    as_sym_int: SymIntArgument | UnsetType = UNSET
    as_sym_ints: list[SymIntArgument] | UnsetType = UNSET
    as_scalar_type: int | UnsetType = UNSET
    as_memory_format: int | UnsetType = UNSET
    as_layout: int | UnsetType = UNSET
    as_device: Device | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET
    as_bools: list[bool] | UnsetType = UNSET
    as_sym_bool: SymBoolArgument | UnsetType = UNSET
    as_sym_bools: list[SymBoolArgument] | UnsetType = UNSET
    as_graph: GraphArgument | UnsetType = UNSET
    as_optional_tensors: list[OptionalTensor] | UnsetType = UNSET
    as_custom_obj: CustomObject | UnsetType = UNSET
    as_operator: str | UnsetType = UNSET
    as_sym_float: SymFloatArgument | UnsetType = UNSET
    as_sym_floats: list[SymFloatArgument] | UnsetType = UNSET
    as_optional_tensor: OptionalTensor | UnsetType = UNSET
    as_complex: Complex | UnsetType = UNSET
    as_nested_tensors: list[list[Named]] | UnsetType = UNSET
    as_int_lists: list[list[Size]] | UnsetType = UNSET
    as_string_to_argument: dict[str, Any] | UnsetType = UNSET
    as_float_lists: list[list[float]] | UnsetType = UNSET


class NamedArgument(_Strict):
    """An argument of a call, by its name in the operator's schema."""

    name: str
    arg: Argument
    kind: int | None = None


class Node(_Strict):
    """One call of an operator."""

    target: str
    inputs: list[NamedArgument]
    outputs: list[Argument]
    metadata: dict[str, str]
    is_hop_single_tensor_return: bool | None = None
    name: str | None = None


class Graph(_Strict):
    """A graph with the metadata of all its values."""

    inputs: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    tensor_values: dict[str, TensorMeta]
    sym_int_values: dict[str, SymInt]
    sym_bool_values: dict[str, SymBool]
    is_single_tensor_return: bool = False
    custom_obj_values: dict[str, CustomObject] = {}
    sym_float_values: dict[str, SymFloat] = {}


class UserInput(_Strict):
    """An input that the caller passes."""

    arg: Argument


class ParameterInput(_Strict):
    """An input that is a parameter of the module."""

    arg: Named
    parameter_name: str


class BufferInput(_Strict):
    """An input that is a buffer of the module."""

    arg: Named
    buffer_name: str
    persistent: bool


class ConstantTensorInput(_Strict):
    """An input that is a constant of the module."""

    arg: Named
    tensor_constant_name: str


class CustomObjectInput(_Strict):
    """An input that is a C++ object."""

    arg: CustomObject
    custom_obj_name: str


class TokenInput(_Strict):
    """An input that orders side effects."""

    arg: Named


class ConstantValue(_Strict):
    """The constant value of an argument that was not a tensor at export."""

    as_none: bool | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET
    as_float: float | UnsetType = UNSET
    as_string: str | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class ConstantInput(_Strict):
    """An argument that the export made a constant."""

    name: str
    value: ConstantValue


class InputSpec(_Strict):
    """The meaning of a graph input: a union with exactly one field set."""

    user_input: UserInput | UnsetType = UNSET
    parameter: ParameterInput | UnsetType = UNSET
    buffer: BufferInput | UnsetType = UNSET
    tensor_constant: ConstantTensorInput | UnsetType = UNSET
    custom_obj: CustomObjectInput | UnsetType = UNSET
    token: TokenInput | UnsetType = UNSET
    constant_input: ConstantInput | UnsetType = UNSET


class UserOutput(_Strict):
    """An output that is returned to the caller."""

    arg: Argument


class BufferMutation(_Strict):
    """An output that replaces a buffer."""

    arg: Named
    buffer_name: str


class ParameterMutation(_Strict):
    """An output that replaces a parameter."""

    arg: Named
    parameter_name: str


class InputMutation(_Strict):
    """An output that updates an input tensor, or is its gradient."""

    arg: Named
    user_input_name: str


class OutputSpec(_Strict):
    """The meaning of a graph output: a union with exactly one field set."""

    user_output: UserOutput | UnsetType = UNSET
    loss_output: dict[str, Any] | UnsetType = UNSET
    buffer_mutation: BufferMutation | UnsetType = UNSET
    gradient_to_parameter: ParameterMutation | UnsetType = UNSET
    gradient_to_user_input: InputMutation | UnsetType = UNSET
    user_input_mutation: InputMutation | UnsetType = UNSET
    token: dict[str, Any] | UnsetType = UNSET
    parameter_mutation: ParameterMutation | UnsetType = UNSET


class Signature(_Strict):
    """The meanings of all inputs and outputs, in order."""

    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]


class Range(_Strict):
    """The allowed sizes of a symbol; None for no bound."""

    min_val: int | None
    max_val: int | None


class ModuleSignature(_Strict):
    """The structure of a module's arguments and results; the specs are JSON texts."""

    inputs: list[Argument]
    outputs: list[Argument]
    in_spec: str
    out_spec: str
    forward_arg_names: list[str] | None = None


class ModuleEntry(_Strict):
    """A module that was called; the first entry is the program itself."""

    fqn: str
    signature: ModuleSignature | None = None


class NamedTuple(_Strict):
    """The fields of a named tuple."""

    field_names: list[str]


class GraphModule(_Strict):
    """A graph and its signature."""

    graph: Graph
    signature: Signature
    module_call_graph: list[ModuleEntry]
    metadata: dict[str, str] = {}
    treespec_namedtuple_fields: dict[str, NamedTuple] = {}


class SchemaVersion(_Strict):
    """The version of this schema."""

    major: int
    minor: int


class ExportedProgram(_Strict):
    """A whole program, without its tensors."""

    graph_module: GraphModule
    opset_version: dict[str, int]
    range_constraints: dict[str, Range]
    schema_version: SchemaVersion
    verifiers: list[str] = []
    torch_version: str = ""
    guards_code: list[str] = []


class Payload(_Strict):
    """The file that stores a tensor of the module."""

    path_name: str
    is_param: bool
    use_pickle: bool
    tensor_meta: TensorMeta | None


class PayloadConfig(_Strict):
    """The module's tensors by name."""

    config: dict[str, Payload]


def present(union: msgspec.Struct) -> list[str]:
    """Return the names of the fields that are set in a union; valid files have one."""
    return [
        name for name in union.__struct_fields__ if not isinstance(getattr(union, name), UnsetType)
    ]
