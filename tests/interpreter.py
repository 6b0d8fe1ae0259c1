"""Triton's interpreter in a fraction of its time, with the same bits.

It makes anew, at every operation, what is the same at every one, and computes what nobody reads.
"""

import dataclasses
import functools
import inspect
import types

import numpy as np
import torch


def quicken() -> None:
    """Put the functions below in the place of the interpreter's, in a Triton that has what they replace."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()
        _remember_types()
        _call_builtins_directly()
        _convert_whole_arrays()
        _leave_out_unread_checks()
        _check_sizes_once()
        _bind_arguments_once()
    if hasattr(interpreter.interpreter_semantic, "_cast_to_computation_type"):
        _combine_types_once()


def _patch_once_a_launch() -> None:
    """Triton's interpreter puts its own functions in place at every call that a kernel makes: a third of all its time.

    Once a launch, and once more where a function sees the language by its other name, does the same.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, patched, seen = interpreter._patch_lang, set(), {}

    def patch_once(function):
        if function not in seen:
            values = function.__globals__.values()
            seen[function] = {id(value) for value in values if value is language or value is language.core}
        langs = seen[function]
        if langs <= patched:
            return interpreter._LangPatchScope()
        scope, outermost = patch(function), not patched
        patched.update(langs)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def _remember_types() -> None:
    """Triton's interpreter makes every type anew for every value, and looks for builtins anew for every launch.

    Made once, they take a third of all its time less.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    find_dtype, is_builtin = interpreter._get_np_dtype, core.is_builtin
    types, dtypes, builtins = {}, {}, {}
    whole = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def new_type(cls, element_ty, shape):
        if type(element_ty) not in (core.dtype, core.pointer_type):
            return object.__new__(cls)
        sizes = [getattr(size, "value", size) for size in getattr(shape, "values", shape)]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
        if key not in types:
            types[key] = object.__new__(cls)
        return types[key]

    def make_type_once(self, element_ty, shape):
        if "name" not in self.__dict__:
            make_type(self, element_ty, shape)

    def make_tensor_like_another(self, handle, type):
        like = type.__dict__.get("of_tensors")
        if like is None:
            make_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(like)
            self.handle = handle

    def find_dtype_once(of):
        scalar = of.element_ty if type(of) is core.block_type else of
        if scalar.name not in dtypes:
            dtypes[scalar.name] = find_dtype(of)
        return dtypes[scalar.name]

    def patch_builtins(package, builder, scope):
        if id(package) not in builtins:
            builtins[id(package)] = [each for each in inspect.getmembers(package) if is_builtin(each[1])]
        for name, member in builtins[id(package)]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def unwrap_sooner(value):
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in whole else unwrap(value)

    core.block_type.__new__, core.block_type.__init__ = new_type, make_type_once
    core.tensor.__init__, core._unwrap_if_constexpr = make_tensor_like_another, unwrap_sooner
    interpreter._get_np_dtype, interpreter._patch_builtin = find_dtype_once, patch_builtins


def _call_builtins_directly() -> None:
    """A builtin is called through two functions that do no more than pass on who interprets it."""
    from triton.language import core
    from triton.runtime import interpreter

    passes_on, patch_attr, members = core.program_id.__code__, interpreter._patch_attr, {}

    def patch_attr_once(obj, name, member, builder, scope):
        if getattr(member, "__code__", None) is not passes_on:
            return patch_attr(obj, name, member, builder, scope)
        if member not in members:
            function, semantic = member.__wrapped__, interpreter.interpreter_semantic

            def call(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return function(*args, **kwargs)

            members[member] = call
        scope.set_attr(obj, name, members[member])

    interpreter._patch_attr = patch_attr_once


def _leave_out_unread_checks() -> None:
    """Every sum and product of integers is computed again in int64, for an assertion that only debugging makes."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _check_sizes_once() -> None:
    """Whether a result is of its dtype's size is looked at twice for every result."""
    from triton.runtime import interpreter

    builder, handle_of, fits = interpreter.interpreter_builder, interpreter.TensorHandle, {}
    compute = builder.binary_op

    def binary_op(lhs, rhs, op):
        if lhs.data.dtype == rhs.data.dtype == np.bool_:
            return compute(lhs, rhs, op)
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        key = output.dtype, dtype.name
        if key not in fits:
            fits[key] = interpreter._validate_np_data_size(output, dtype)
        handle = object.__new__(handle_of)
        handle.data = output if fits[key] else output.astype(interpreter._get_np_dtype(dtype))
        handle.dtype, handle.attr = dtype, {}
        return handle

    builder.binary_op = binary_op


def _bind_arguments_once() -> None:
    """A kernel's parameters are read from its signature twice a launch."""
    from triton.runtime import interpreter

    read = functools.cache(inspect.getfullargspec)

    def bind(function, *args, **kwargs):
        given = dict(zip(read(function).args, args, strict=False)) | kwargs
        if len(given) == len(args) + len(kwargs) and list(given) == read(function).args:
            return given
        return inspect.getcallargs(function, *args, **kwargs)

    interpreter.inspect = types.SimpleNamespace(**vars(inspect) | {"getfullargspec": read, "getcallargs": bind})


def _convert_whole_arrays() -> None:
    """erf is computed by Python, number by number, and bfloat16 converted from its exponent and significand."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def erf(x):
        exact = torch.erf(torch.from_numpy(np.array(x, dtype=np.float64, order="C")))
        return exact.numpy().astype(x.dtype)

    def convert_by_shift(data, source, target, rounding):
        names = source.name, target.name
        if rounding is not None or names not in (("bf16", "fp32"), ("fp32", "bf16")):
            return convert(data, source, target, rounding)
        bits = data.view(np.uint16 if names[0] == "bf16" else np.uint32)
        magnitude, subnormal = bits & (0x7FFF, 0x7FFFFFFF)[names[0] == "fp32"], (0x7F, 0x7FFFFF)[names[0] == "fp32"]
        if ((magnitude > 0) & (magnitude <= subnormal)).any():
            return convert(data, source, target, rounding)
        return bits.astype(np.uint32) << 16 if names[0] == "bf16" else (bits >> 16).astype(np.uint16)

    interpreter.np_erf_fp32 = interpreter.np_erf_fp64 = erf
    interpreter._convert_float = convert_by_shift


def _combine_types_once() -> None:
    """What two operands are cast and broadcast to depends on their types alone."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    check, cast, broadcast = semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value
    block_to_ir, promoted, constants, combined = core.block_type.to_ir, {}, {}, {}
    numbers = frozenset((int, float, bool))

    def cast_what_differs(input, dst_ty, *rounding, **kwargs):
        return input if input.dtype is dst_ty.scalar else cast(input, dst_ty, *rounding, **kwargs)

    def sizes_of(type):
        return tuple(getattr(size, "value", size) for size in type.shape.values)

    def splat_like(value, block):
        return core.tensor(builder.create_splat(block, value.handle), core.block_type(value.dtype, block.shape))

    def broadcast_once(lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if not left.is_block():
            return (splat_like(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, splat_like(rhs, left)
        key = sizes_of(left), sizes_of(right)
        if key[0] == key[1]:
            return lhs, rhs
        if len(key[0]) != len(key[1]):
            return broadcast(lhs, rhs)
        if key not in combined:
            combined[key] = list(sizes_of(broadcast(lhs, rhs)[0].type))
        shape = combined[key]
        return tuple(
            operand
            if list(sizes) == shape
            else core.tensor(builder.create_broadcast(operand.handle, shape), core.block_type(operand.dtype, shape))
            for operand, sizes in zip((lhs, rhs), key, strict=True)
        )

    def promote(left, left_is_number, right, right_is_number, div_or_mod):
        key = left.name, left_is_number, right.name, right_is_number, div_or_mod
        if key not in promoted:
            promoted[key] = semantic.computation_type_impl(left, left_is_number, right, right_is_number, div_or_mod)
        return promoted[key]

    def with_number(tensor, number, number_first, div_or_mod):
        key = type(number), number or repr(number), tensor.dtype.name, number_first, div_or_mod
        if key not in constants:
            types = [(tensor.dtype, False), (semantic.to_tensor_type(number), True)]
            (left, left_is_number), (right, right_is_number) = types[::-1] if number_first else types
            dtype = promote(left, left_is_number, right, right_is_number, div_or_mod)
            constants[key] = semantic._cast_to_computation_type(number, dtype)
        constant = constants[key]
        tensor = cast_what_differs(tensor, constant.dtype)
        return broadcast_once(constant, tensor) if number_first else broadcast_once(tensor, constant)

    def check_once(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if arithmetic_check and type(lhs) is core.tensor:
            left, right = lhs.dtype, getattr(rhs, "dtype", None)
            if type(right) is core.dtype and type(left) is core.dtype:
                if left is not right or div_or_mod:
                    dtype = promote(left, False, right, False, div_or_mod)
                    lhs, rhs = cast_what_differs(lhs, dtype), cast_what_differs(rhs, dtype)
                return broadcast_once(lhs, rhs)
            if type(left) is core.dtype and type(rhs) in numbers:
                return with_number(lhs, rhs, False, div_or_mod)
        elif arithmetic_check and type(lhs) in numbers and type(getattr(rhs, "dtype", None)) is core.dtype:
            return with_number(rhs, lhs, True, div_or_mod)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def create_splat(block, scalar):
        return interpreter.TensorHandle(
            np.full(sizes_of(block), scalar.data, dtype=interpreter._get_np_dtype(scalar.dtype)), scalar.dtype.scalar
        )

    def block_to_ir_itself(self, of):
        return self if of is builder and type(self.element_ty) is core.dtype else block_to_ir(self, of)

    semantic.make_tensor = core.tensor
    semantic.binary_op_type_checking_impl, semantic.cast = check_once, cast_what_differs
    semantic.broadcast_impl_value, builder.create_splat = broadcast_once, create_splat
    core.block_type.to_ir = block_to_ir_itself
