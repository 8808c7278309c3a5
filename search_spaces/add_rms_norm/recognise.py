"""Recognition of a root-mean-square norm of the sum of two arrays in a jaxpr."""

from __future__ import annotations

from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.recognise.graph import Node
from search_spaces.recognise.pattern import Recognised, as_of, source, strip
from search_spaces.rms_norm.recognise import norm, recognised


def recognise(node: Node) -> Recognised | None:
    """Recognises a norm of ``x + residual`` if the sum is rounded to the dtype of the result."""
    found = norm(node)
    added = None if found is None else strip(found.x).by("add")
    if found is None or added is None or strip(found.x).dtype != found.result.dtype:
        return None
    for each in added.inputs:
        of = as_of(each, found.result.dtype)
        if of is None or of.shape != found.result.shape or source(of)[0].shape != of.shape:  # one row for all is a bias
            return None
    return recognised(AddRmsNormProblem, found, [*added.inputs, found.weight], node, "tuned_rms_norm(residual=)")
