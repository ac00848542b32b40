"""Uses a server with whatever client is installed: python client_check.py URL MODEL."""

import os
import sys

os.environ.setdefault("TINKER_API_KEY", "tml-check")
import tinker
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1])
training = service.create_lora_training_client(base_model=sys.argv[2], rank=4).result()
client = training.save_weights_and_get_sampling_client()
client = client.result() if hasattr(client, "result") else client
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=4)
answer = client.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
assert all(len(x.tokens) == len(x.logprobs) > 0 for x in answer.sequences)
assert client.compute_logprobs(prompt).result()[0] is None
inputs = {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}
datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
losses = []
for _ in range(3):
  loss = training.forward_backward([datum], "cross_entropy")
  training.optim_step(types.AdamParams(learning_rate=0.01)).result()
  losses.append(loss.result().metrics["loss:sum"])
assert losses[2] < losses[0]
path = training.save_state("check").result().path
again = service.create_training_client_from_state_with_optimizer(path)
again = again.result() if hasattr(again, "result") else again
again.optim_step(types.AdamParams()).result()
print("it works with", getattr(tinker, "__version__", "this client"))
