"""Prints the parameters of the members of verl on which the adapter depends, as JSON after `seen`."""

import importlib
import inspect
import json
import os
import sys

os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # the adapter replaces some of them

from verl.checkpoint_engine import base  # noqa: F401 - verl's modules import each other in this order

found = {}
for name in sys.argv[1:]:
    module, _, member = name.partition(":")
    owner = importlib.import_module(module)
    try:
        for part in member.split("."):
            owner = inspect.getattr_static(owner, part)
    except AttributeError:
        found[name] = "missing"
        continue
    owner = owner.__func__ if isinstance(owner, classmethod | staticmethod) else owner
    if not callable(owner):
        found[name] = type(owner).__name__
    else:
        signature = inspect.signature(inspect.unwrap(owner))
        plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        found[name] = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
print("seen " + json.dumps(found), flush=True)
