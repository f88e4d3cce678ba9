"""DataParallel against one GPU, over batch sizes, in training and in inference.

    python data_parallel.py --model resnet50 --image-size 224

It needs two GPUs: with fewer, DataParallel does nothing, and there is nothing to see.
"""

import argparse
import os
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/../../..")  # the repo's root
import common


def speed(model, images, labels, train):
    """Return images a second: the best of three windows of five steps, after one to warm up."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(5):
            with torch.set_grad_enabled(train):
                loss = F.cross_entropy(model(images), labels)
            if train:
                model.zero_grad()
                loss.backward()
        seconds.append(common.seconds_since(start, images.device) / 5)
    return len(images) / min(seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64, 256])
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("not seen: DataParallel needs two GPUs, and this machine has fewer")
        return
    args.dataset, args.channels = "fake", 3
    device = common.take_device(0)
    model = common.build_model(args).to(device)
    for train in (True, False):
        model.train(train)
        for batch in args.batch_sizes:
            args.train_size = batch
            images, labels = (x.to(device) for x in common.load_datasets(args)[0].tensors)
            one = speed(model, images, labels, train)
            all_ = speed(torch.nn.DataParallel(model), images, labels, train)
            kind = "training" if train else "inference"
            print(f"{kind:9} batch {batch:5} | one GPU {one:8.0f} | all {all_:8.0f} images/s")


if __name__ == "__main__":
    main()
