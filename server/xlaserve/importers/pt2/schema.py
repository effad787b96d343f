"""The JSON of torch.export (schema 8) for msgspec: unlisted fields are refused.

Names are those of `torch/_export/serde/schema.py`. What PyTorch writes as a union, an object with
one of many keys, is a struct whose fields are all left out but one.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAJOR = 8
"""Major version of the schema; a change of the minor one adds fields, which are refused by name."""

Size: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Device(_Strict):
    """Device of a tensor at the export; ignored here."""

    type: str
    index: int | None = None


class Hint(_Strict):
    """The value that a symbol had in the example."""

    as_int: Size | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class Expression(_Strict):
    """An expression of symbols, in the text that sympy prints."""

    expr_str: str
    hint: Hint | None = None


class SymInt(_Strict):
    """One size: a number or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET


class SymFloat(_Strict):
    """One real number: known or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class SymBool(_Strict):
    """One truth: known or an expression."""

    as_expr: Expression | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class TensorMeta(_Strict):
    """The description of one tensor."""

    dtype: int
    sizes: list[SymInt]
    requires_grad: bool
    device: Device
    strides: list[SymInt]
    storage_offset: SymInt
    layout: int


class Named(_Strict):
    """The name of a tensor of the graph."""

    name: str


class SymIntArgument(_Strict):
    """One integer, or the name of one that is computed."""

    as_name: str | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET


class SymFloatArgument(_Strict):
    """One real number, or the name of one that is computed."""

    as_name: str | UnsetType = UNSET
    as_float: float | UnsetType = UNSET


class SymBoolArgument(_Strict):
    """One truth, or the name of one that is computed."""

    as_name: str | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class OptionalTensor(_Strict):
    """A tensor, or none."""

    as_tensor: Named | UnsetType = UNSET
    as_none: bool | UnsetType = UNSET


class GraphArgument(_Strict):
    """A graph within a graph."""

    name: str
    graph: "Graph"


class Complex(_Strict):
    """One complex number."""

    real: float
    imag: float


class CustomObject(_Strict):
    """An object of C++, which is a pickle elsewhere."""

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
    """One argument of a call, by its name in the operator's schema."""

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
    """A graph, with a description of every value in it."""

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
    """An input that a caller gives."""

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
    """An input that is an object of C++."""

    arg: CustomObject
    custom_obj_name: str


class TokenInput(_Strict):
    """An input that orders effects."""

    arg: Named


class ConstantValue(_Strict):
    """The value of an argument that was no tensor at the export, and is fixed by it."""

    as_none: bool | UnsetType = UNSET
    as_int: Size | UnsetType = UNSET
    as_float: float | UnsetType = UNSET
    as_string: str | UnsetType = UNSET
    as_bool: bool | UnsetType = UNSET


class ConstantInput(_Strict):
    """An argument that the export fixed."""

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
    """An output that a caller gets."""

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
    """An output that updates a caller's tensor, or is its gradient."""

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
    """The meanings of all inputs and outputs, in their order."""

    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]


class Range(_Strict):
    """The sizes that a symbol may have; None for no bound."""

    min_val: int | None
    max_val: int | None


class ModuleSignature(_Strict):
    """How a module is called: its trees of arguments and results, as JSON in a text."""

    inputs: list[Argument]
    outputs: list[Argument]
    in_spec: str
    out_spec: str
    forward_arg_names: list[str] | None = None


class ModuleEntry(_Strict):
    """One module that was called; the first is the program itself."""

    fqn: str
    signature: ModuleSignature | None = None


class NamedTuple(_Strict):
    """The fields of a named tuple."""

    field_names: list[str]


class GraphModule(_Strict):
    """The graph and its meaning."""

    graph: Graph
    signature: Signature
    module_call_graph: list[ModuleEntry]
    metadata: dict[str, str] = {}
    treespec_namedtuple_fields: dict[str, NamedTuple] = {}


class SchemaVersion(_Strict):
    """The version of all this."""

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
    """Storage of one tensor of a module."""

    path_name: str
    is_param: bool
    use_pickle: bool
    tensor_meta: TensorMeta | None


class PayloadConfig(_Strict):
    """The tensors of a module by name."""

    config: dict[str, Payload]


def present(union: msgspec.Struct) -> list[str]:
    """Return the fields set in a union; one, in PyTorch's files."""
    return [
        name for name in union.__struct_fields__ if not isinstance(getattr(union, name), UnsetType)
    ]
