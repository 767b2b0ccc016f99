"""The paper's vision run: DavidNet on CIFAR-10."""
