"""A ready-made Flower app: softmax regression on scikit-learn's digits, for ``aqg flower demo``."""
