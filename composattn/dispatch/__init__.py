"""From a call to the plan that runs it: plans made and kept, operators of torch, transforms of torch.func."""
