"""Public operations: check arguments, allocate outputs, call ``torch.ops.mlacast``.

Each module has the public function, ``run`` (the eager body behind the registered operation, which
selects a backend) and ``required_features``.
"""
