"""Lab 1: make two processes of one. Do the TODOs in the order of their numbers.

The task is in labs/1_two_processes/README.md. It is done when two ranks have the losses of one.
"""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, f"{os.path.dirname(__file__)}/../../..")  # the repo's root
import checks
import common


# TODO 2: each process is told its rank, takes the device of that number and joins the group.
# One of them prints the start line.
def main(args):
    device = common.take_device()
    common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    # TODO 3: a rank reads its share of the training set; all shares make up the set.
    sampler = RandomSampler(train_set, generator=torch.Generator())
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    # TODO 4: a rank tests its share of the test set. No sample may count twice.
    test_loader = DataLoader(test_set, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0

    # TODO 5: the gradients of all ranks must be averaged in backward().

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        # TODO 6: the sampler of TODO 3 has another way to be told the epoch.
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
        # TODO 7: evaluate the model itself, not its wrapper. The sums are of one rank:
        # they must be those of all. Then one rank saves and prints.
        sums[2:] = common.evaluate(model, test_loader, device)
        checks.loss_is_finite(args, epoch, sums)
        common.save_checkpoint(args, epoch + 1, model, optimizer)
        common.log_epoch(args, epoch, sums, seconds)
    # TODO 8: leave the group.


if __name__ == "__main__":
    args = common.parse_args("spawn", nproc=2)  # adds --nproc, and divides the batch
    # TODO 1: tell the processes where they meet (checks.free_port() is a port that nobody
    # has), and start args.nproc of them.
    main(args)
