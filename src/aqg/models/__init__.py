"""Models by name that are torch modules: ``cnn``, ``resnet8`` and ``transformer``.

Logistic and softmax regression and the perceptron are no modules; see `aqg.objectives`.
"""

from aqg.models.names import MODULES, DataShape, is_module, make_module

__all__ = ["MODULES", "DataShape", "is_module", "make_module"]
