"""Calls every public function of JAX's linear algebra, transforms, random numbers and jax.scipy.

The functions come from JAX's modules; the arguments are defined here. A function that does not fit
its module's rule has a row in `CALLS`, or a reason in `LEFT_OUT`.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.lax.linalg
import jax.numpy as jnp
import jax.scipy.optimize
import numpy as np

MATRIX = np.array([[4, 1, 0.5], [1, 3, 0.2], [0.5, 0.2, 2]], np.float32)
"""A symmetric positive-definite matrix."""
VECTOR = np.array([0.3, 0.5, 0.7], np.float32)

Call = Callable[[Any, Any], Any]
"""Calls a function with a matrix and a vector."""

_NUMBERS = (0.7, 1.3, 0.4, 0.2)
"""Additional arguments for functions of numbers."""

_lu = jax.scipy.linalg
_la = jax.lax.linalg
_random: Any = jax.random
_stats = jax.scipy.stats


def _key() -> Any:
    return jax.random.key(7)


def _of_vector(function: Any) -> Call:
    return lambda a, v: function(v, *_NUMBERS[: _required(function) - 1])


def _of_matrix(function: Any) -> Call:
    return lambda a, v: function(a)


def _of_key(function: Any) -> Call:
    more = _required(function) - 1
    return lambda a, v: function(_key(), *((v,) * min(more, 1)), *_NUMBERS[: max(more - 1, 0)])


def _required(function: Any) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in parameters)


RULES: Mapping[str, Callable[[Any], Call]] = {
    "jax.numpy.linalg": _of_matrix,
    "jax.numpy.fft": _of_matrix,
    "jax.lax.linalg": _of_matrix,
    "jax.random": _of_key,
    "jax.scipy.fft": _of_matrix,
    "jax.scipy.linalg": _of_matrix,
}
"""How to call the functions of a module; by default with a vector and numbers."""

CALLS: Mapping[str, Call] = {
    # jax.numpy.linalg
    "jax.numpy.linalg.cross": lambda a, v: jnp.linalg.cross(a[0], v),
    "jax.numpy.linalg.lstsq": lambda a, v: jnp.linalg.lstsq(a, v)[0],
    "jax.numpy.linalg.matmul": lambda a, v: jnp.linalg.matmul(a, a),
    "jax.numpy.linalg.matrix_power": lambda a, v: jnp.linalg.matrix_power(a, -2),
    "jax.numpy.linalg.multi_dot": lambda a, v: jnp.linalg.multi_dot([a, a, v]),
    "jax.numpy.linalg.outer": lambda a, v: jnp.linalg.outer(v, v),
    "jax.numpy.linalg.solve": jnp.linalg.solve,
    "jax.numpy.linalg.tensordot": lambda a, v: jnp.linalg.tensordot(a, a),
    "jax.numpy.linalg.tensorinv": lambda a, v: jnp.linalg.tensorinv(a, ind=1),
    "jax.numpy.linalg.tensorsolve": jnp.linalg.tensorsolve,
    "jax.numpy.linalg.vecdot": lambda a, v: jnp.linalg.vecdot(a, v[None]),
    # jax.numpy.fft
    "jax.numpy.fft.fftfreq": lambda a, v: jnp.fft.fftfreq(4) * v[0],
    "jax.numpy.fft.rfftfreq": lambda a, v: jnp.fft.rfftfreq(4) * v[0],
    # jax.lax.linalg
    "jax.lax.linalg.cholesky_update": lambda a, v: _la.cholesky_update(jnp.linalg.cholesky(a).T, v),
    "jax.lax.linalg.householder_product": _la.householder_product,
    "jax.lax.linalg.lu_pivots_to_permutation": lambda a, v: _la.lu_pivots_to_permutation(
        _la.lu(a)[1], 3
    ),
    "jax.lax.linalg.symmetric_product": lambda a, v: _la.symmetric_product(a, a),
    "jax.lax.linalg.triangular_solve": lambda a, v: _la.triangular_solve(a, a),
    "jax.lax.linalg.tridiagonal_solve": lambda a, v: _la.tridiagonal_solve(
        v.at[0].set(0), a.diagonal(), v.at[2].set(0), a
    ),
    # jax.random
    "jax.random.PRNGKey": lambda a, v: jax.random.PRNGKey(7) + (v[0] > 1).astype("uint32"),
    "jax.random.Key": lambda a, v: _random.Key(7),
    "jax.random.key": lambda a, v: jax.random.uniform(jax.random.key(7), (3,)) * v,
    "jax.random.ball": lambda a, v: jax.random.ball(_key(), 3) * v,
    "jax.random.bernoulli": lambda a, v: jax.random.bernoulli(_key(), v),
    "jax.random.binomial": lambda a, v: jax.random.binomial(_key(), 5 * v, v),
    "jax.random.bits": lambda a, v: jax.random.bits(_key(), (3,)) + (v > 1).astype("uint32"),
    "jax.random.choice": lambda a, v: jax.random.choice(_key(), v, (3,)),
    "jax.random.double_sided_maxwell": lambda a, v: jax.random.double_sided_maxwell(_key(), v, 0.5),
    "jax.random.fold_in": lambda a, v: jax.random.fold_in(_key(), 1),
    "jax.random.geometric": lambda a, v: jax.random.geometric(_key(), v),
    "jax.random.key_data": lambda a, v: jax.random.key_data(_key()),
    "jax.random.multinomial": lambda a, v: jax.random.multinomial(_key(), 3.0, v / v.sum()),
    "jax.random.multivariate_normal": lambda a, v: jax.random.multivariate_normal(_key(), v, a),
    "jax.random.orthogonal": lambda a, v: jax.random.orthogonal(_key(), 3) @ a,
    "jax.random.permutation": lambda a, v: jax.random.permutation(_key(), a),
    "jax.random.randint": lambda a, v: jax.random.randint(_key(), (3,), 0, 9),
    "jax.random.truncated_normal": lambda a, v: jax.random.truncated_normal(_key(), v, v + 1),
    "jax.random.triangular": lambda a, v: jax.random.triangular(_key(), v, v + 1, v + 2),
    "jax.random.uniform": lambda a, v: jax.random.uniform(_key(), (3,)) * v,
    "jax.random.normal": lambda a, v: jax.random.normal(_key(), (3,)) * v,
    "jax.random.generalized_normal": lambda a, v: jax.random.generalized_normal(_key(), 1.5, (3,)),
    "jax.random.rademacher": lambda a, v: jax.random.rademacher(_key(), (3,)),
    "jax.random.wrap_key_data": lambda a, v: jax.random.wrap_key_data(
        jnp.ones(2, "uint32") + (v[:2] > 1).astype("uint32")
    ),
    # jax.scipy
    "jax.scipy.cluster.vq.vq": lambda a, v: jax.scipy.cluster.vq.vq(a, a[:2]),
    "jax.scipy.integrate.trapezoid": lambda a, v: jax.scipy.integrate.trapezoid(v),
    "jax.scipy.ndimage.map_coordinates": lambda a, v: jax.scipy.ndimage.map_coordinates(
        a, [v, v], order=1
    ),
    "jax.scipy.optimize.minimize": lambda a, v: (
        jax.scipy.optimize.minimize(lambda x: x @ a @ x - x @ v, v, method="BFGS").x
    ),
    "jax.scipy.linalg.block_diag": lambda a, v: _lu.block_diag(a, a),
    "jax.scipy.linalg.cho_solve": lambda a, v: _lu.cho_solve(_lu.cho_factor(a), v),
    "jax.scipy.linalg.circulant": lambda a, v: _lu.circulant(v),
    "jax.scipy.linalg.companion": lambda a, v: _lu.companion(v),
    "jax.scipy.linalg.convolution_matrix": lambda a, v: _lu.convolution_matrix(v, 4),
    "jax.scipy.linalg.dft": lambda a, v: _lu.dft(3) * v,
    "jax.scipy.linalg.eigh_tridiagonal": lambda a, v: _lu.eigh_tridiagonal(
        a.diagonal(), v[:2], eigvals_only=True
    ),
    "jax.scipy.linalg.expm_frechet": lambda a, v: _lu.expm_frechet(a, a),
    "jax.scipy.linalg.fiedler": lambda a, v: _lu.fiedler(v),
    "jax.scipy.linalg.fiedler_companion": lambda a, v: _lu.fiedler_companion(v),
    "jax.scipy.linalg.funm": lambda a, v: _lu.funm(a, jnp.sin),
    "jax.scipy.linalg.hadamard": lambda a, v: _lu.hadamard(2) * v[0].astype("int32"),
    "jax.scipy.linalg.hankel": lambda a, v: _lu.hankel(v),
    "jax.scipy.linalg.helmert": lambda a, v: _lu.helmert(3) * v,
    "jax.scipy.linalg.hilbert": lambda a, v: _lu.hilbert(3) * v,
    "jax.scipy.linalg.invhilbert": lambda a, v: _lu.invhilbert(3) * v,
    "jax.scipy.linalg.invpascal": lambda a, v: _lu.invpascal(3) * v,
    "jax.scipy.linalg.leslie": lambda a, v: _lu.leslie(v, v[:2]),
    "jax.scipy.linalg.lu_solve": lambda a, v: _lu.lu_solve(_lu.lu_factor(a), v),
    "jax.scipy.linalg.pascal": lambda a, v: _lu.pascal(3) * v,
    "jax.scipy.linalg.rsf2csf": lambda a, v: _lu.rsf2csf(*_lu.schur(a)),
    "jax.scipy.linalg.solve": _lu.solve,
    "jax.scipy.linalg.solve_sylvester": lambda a, v: _lu.solve_sylvester(a, a, a),
    "jax.scipy.linalg.solve_triangular": _lu.solve_triangular,
    "jax.scipy.linalg.toeplitz": lambda a, v: _lu.toeplitz(v),
    "jax.scipy.signal.convolve": lambda a, v: jax.scipy.signal.convolve(v, v),
    "jax.scipy.signal.convolve2d": lambda a, v: jax.scipy.signal.convolve2d(a, a),
    "jax.scipy.signal.correlate": lambda a, v: jax.scipy.signal.correlate(v, v),
    "jax.scipy.signal.correlate2d": lambda a, v: jax.scipy.signal.correlate2d(a, a),
    "jax.scipy.signal.csd": lambda a, v: jax.scipy.signal.csd(v, v, nperseg=2),
    "jax.scipy.signal.fftconvolve": lambda a, v: jax.scipy.signal.fftconvolve(v, v),
    "jax.scipy.signal.istft": lambda a, v: jax.scipy.signal.istft(
        jax.scipy.signal.stft(jnp.tile(v, 4), nperseg=4)[2], nperseg=4
    ),
    "jax.scipy.signal.stft": lambda a, v: jax.scipy.signal.stft(jnp.tile(v, 4), nperseg=4),
    "jax.scipy.signal.welch": lambda a, v: jax.scipy.signal.welch(jnp.tile(v, 4), nperseg=4),
    "jax.scipy.sparse.linalg.bicgstab": lambda a, v: jax.scipy.sparse.linalg.bicgstab(a, v)[0],
    "jax.scipy.sparse.linalg.cg": lambda a, v: jax.scipy.sparse.linalg.cg(a, v)[0],
    "jax.scipy.sparse.linalg.gmres": lambda a, v: jax.scipy.sparse.linalg.gmres(a, v)[0],
    "jax.scipy.special.bernoulli": lambda a, v: jax.scipy.special.bernoulli(3) * v[0],
    "jax.scipy.special.bessel_jn": lambda a, v: jax.scipy.special.bessel_jn(v, v=2, n_iter=10),
    "jax.scipy.special.expn": lambda a, v: jax.scipy.special.expn(2, v),
    "jax.scipy.special.factorial": lambda a, v: jax.scipy.special.factorial(v),
    "jax.scipy.special.multigammaln": lambda a, v: jax.scipy.special.multigammaln(v + 2, 2),
    "jax.scipy.special.polygamma": lambda a, v: jax.scipy.special.polygamma(2, v),
    "jax.scipy.special.sph_harm_y": lambda a, v: jax.scipy.special.sph_harm_y(
        jnp.array([1, 2, 3]), jnp.array([0, 1, 1]), v, v, n_max=3
    ),
    "jax.scipy.special.zeta": lambda a, v: jax.scipy.special.zeta(v + 1, 1.0),
    "jax.scipy.stats.dirichlet.logpdf": lambda a, v: _stats.dirichlet.logpdf(v / v.sum(), v),
    "jax.scipy.stats.dirichlet.pdf": lambda a, v: _stats.dirichlet.pdf(v / v.sum(), v),
    "jax.scipy.stats.multinomial.logpmf": lambda a, v: _stats.multinomial.logpmf(
        jnp.array([1, 1, 1]), 3, v / v.sum()
    ),
    "jax.scipy.stats.multinomial.pmf": lambda a, v: _stats.multinomial.pmf(
        jnp.array([1, 1, 1]), 3, v / v.sum()
    ),
    "jax.scipy.stats.multivariate_normal.logpdf": lambda a, v: _stats.multivariate_normal.logpdf(
        v, v, a
    ),
    "jax.scipy.stats.multivariate_normal.pdf": lambda a, v: _stats.multivariate_normal.pdf(v, v, a),
}

LEFT_OUT: Mapping[str, str] = {
    "jax.random.key_dtype": "returns a datatype",
    "jax.random.key_impl": "returns a name",
    "jax.lax.linalg.ormqr": "jax.export promises nothing of lapack_sormqr_ffi, and refuses it",
    "jax.scipy.linalg.qr_multiply": "the same",
}


def modules() -> Sequence[str]:
    """Return the module names."""
    found = [one.name for one in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy.")]
    return ["jax.numpy.linalg", "jax.numpy.fft", "jax.lax.linalg", "jax.random", *found]


@cache
def calls() -> Mapping[str, Mapping[str, Call]]:
    """Return a call for every public function, by module and name."""
    found = {module: _calls(module) for module in modules()}
    return {module: rows for module, rows in found.items() if rows}


def _calls(module: str) -> dict[str, Call]:
    rule = RULES.get(module, _of_vector)
    return {
        name: CALLS.get(f"{module}.{name}") or rule(function)
        for name, function in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and callable(function) and not inspect.isclass(function)
        if f"{module}.{name}" not in LEFT_OUT
    }


def arrays(found: Any) -> dict[str, Any]:
    """Return a function's results as V2 tensors, by number."""
    return {str(n): _real(leaf) for n, leaf in enumerate(jax.tree.leaves(found))}


def _real(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        return jnp.stack([array.real, array.imag])
    return array
