"""Rung 00b: nn.DataParallel. One process copies the model to all GPUs for each batch and splits
the batch among them. For comparison only: DistributedDataParallel (01) is faster.

One device (DataParallel does nothing):  CUDA_VISIBLE_DEVICES=0 python 00b_data_parallel.py
All GPUs:                                python 00b_data_parallel.py
What changed:                            diff -U0 -w 00_single_gpu.py 00b_data_parallel.py
"""

import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

import checks
import common


def main(args):
    device = common.take_device()
    common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    model = torch.nn.DataParallel(model)  # copies it to every GPU at each forward
    print(f"DataParallel on {len(model.device_ids)} GPUs (0: inactive, the plain model runs)")

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.generator.manual_seed(args.seed + epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels in common.progress(train_loader, epoch):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        sums[2:] = common.evaluate(model, test_loader, device)
        checks.loss_is_finite(args, epoch, sums)
        common.save_checkpoint(args, epoch + 1, model.module, optimizer)
        common.log_epoch(args, epoch, sums, seconds)


if __name__ == "__main__":
    main(common.parse_args())
