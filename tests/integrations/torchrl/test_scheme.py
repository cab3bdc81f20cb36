"""TorchRL's protocol in one process: what a collector calls in the trainer and in its workers."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same
from tests.integrations.torchrl.conftest import WAIT, connect_all, filled
from weightsync.integrations.torchrl import TorchRLScheme


class Context:
    """As much of a worker's collector as a scheme calls."""

    def __init__(self):
        self.updates = []

    def update_policy_weights_(self, policy_or_weights=None, model_id=None):
        self.updates.append((model_id, policy_or_weights.clone()))


def test_it_is_one_of_torchrls_schemes():
    from torchrl.weight_update import WeightSyncScheme

    assert isinstance(TorchRLScheme("shm:///dev/shm/run42"), WeightSyncScheme)
    assert TorchRLScheme("shm:///dev/shm/run42").scheme == ws.DoubleBufferScheme("/dev/shm/run42")


def test_workers_begin_with_the_trainers_weights_and_follow_them(pair):
    model, policies = nn.Linear(4, 3), (nn.Linear(4, 3), nn.Linear(4, 3))
    sending, receiving = pair(model, *policies)
    for policy in policies:
        assert_all_same(policy.state_dict(), model.state_dict())
    for number in range(3):
        filled(model, number)
        sending.send(model)
        for policy in policies:
            assert_all_same(policy.state_dict(), model.state_dict())
    assert [scheme.receive(timeout=0)["bias"].tolist() for scheme in receiving] == [[2] * 3] * 2
    assert receiving[0].receive(timeout=0) is None


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")
def test_modules_tensordict_modules_and_what_is_extracted_of_them(pair, strategy):
    def make():
        return TensorDictModule(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), in_keys=["x"], out_keys=["y"]
        )

    model, policy = make(), make()
    sending, _ = pair(model, policy, strategy=strategy)
    forms = (
        lambda: model,
        lambda: TensorDict.from_module(model),
        lambda: TensorDict.from_module(model).data.flatten_keys("."),
        lambda: model.state_dict(),
    )
    for number, form in enumerate(forms):
        filled(model, number + 1.5)
        sending.send(form())
        assert_all_same(policy.state_dict(), model.state_dict())


def test_a_policy_without_memory_gets_all_of_its_tensors(pair):
    """A collector sends policies on the meta device, buffers that no checkpoint has included."""

    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        return model

    model, policy = make(), make().to("meta")
    pair(model, policy)
    assert policy.scale.tolist() == [3, 3]
    assert_all_same(policy.state_dict(), model.state_dict())


def test_extra_state_travels_with_the_weights(pair):
    class Normalised(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.mean = torch.zeros(2)

        def get_extra_state(self):
            return {"mean": self.mean}

        def set_extra_state(self, state):
            self.mean = state["mean"]

    model, policy = Normalised(), Normalised()
    sending, _ = pair(model, policy)
    model.mean = torch.tensor([5.0, 6.0])
    sending.send(model)
    assert policy.mean.tolist() == [5, 6]


def test_the_context_hears_of_each_version_after_the_first_before_send_returns(pair):
    context, model, policy = Context(), nn.Linear(2, 2), nn.Linear(2, 2)
    sending, receiving = pair(model, policy, worker_options={"context": context})
    assert context.updates == []
    for number in range(1, 4):
        sending.send(filled(model, number))
        model_id, weights = context.updates[-1]
        assert (model_id, weights["bias"].tolist()) == ("policy", [number] * 2)
    assert len(context.updates) == 3
    assert receiving.context is context


def test_weights_for_some_workers_and_for_each_worker(pair):
    model, policies = filled(nn.Linear(2, 2), 0), (nn.Linear(2, 2), nn.Linear(2, 2))
    sending, _ = pair(model, *policies)

    def held():
        return [policy.bias[0].item() for policy in policies]

    sending.send(filled(model, 1), worker_ids=1)
    assert held() == [0, 1]
    sending.send({0: {"weight": torch.full((2, 2), 7.0), "bias": torch.full((2,), 7.0)}})
    assert held() == [7, 1]
    sending.send({number: filled(nn.Linear(2, 2), 10.0 + number) for number in (0, 1)})
    assert held() == [10, 11]
    with pytest.raises(ValueError, match=r"worker_ids=\[2\]"):
        sending.send(model, worker_ids=[2])


def test_n7_weights_that_are_not_the_policys_are_refused_by_name_on_the_trainers_side(pair):
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    sending, _ = pair(model, policy)
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(ws.ReceiverError, match=r"worker-0.*MismatchError.*'wieght'"):
        sending.send({**filled(model, 5).state_dict(), "wieght": torch.zeros(2, 2)})
    assert_all_same(policy.state_dict(), before)
    sending.send({"bias": torch.full((2,), 9.0)})  # a part is as good as it is with TorchRL's own
    assert policy.bias.tolist() == [9, 9]
    assert_all_same({"weight": policy.weight}, {"weight": before["weight"]})


def test_what_fails_in_the_context_is_the_trainers_exception_and_the_policy_goes_back(pair):
    class Broken(Context):
        def update_policy_weights_(self, **update):
            raise RuntimeError("storage was captured")

    context, policy = Broken(), nn.Linear(2, 2)
    sending, _ = pair(filled(nn.Linear(2, 2), 1), policy, worker_options={"context": context})
    with pytest.raises(ws.ReceiverError, match=r"worker-0.*storage was captured"):
        sending.send(filled(nn.Linear(2, 2), 2))
    assert policy.bias.tolist() == [1, 1]


def test_a_worker_that_does_not_come_is_named_at_the_deadline(run_dir, made):
    sending = TorchRLScheme(ws.DoubleBufferScheme(run_dir), timeout=0.3)
    made.append(sending)
    sending.init_on_sender(model_id="policy", model=nn.Linear(2, 2), num_workers=2)
    with pytest.raises(ws.DeadlineError, match=r"0\.3 s for receivers \(worker-0, worker-1\)"):
        sending.connect()


def test_a_worker_that_has_signed_off_is_named_at_the_next_send(pair):
    model, *policies = (nn.Linear(2, 2) for _ in range(3))
    sending, receiving = pair(model, *policies)
    receiving[1].shutdown()
    with pytest.raises(ws.ReceiverError, match="worker-1"):
        sending.send(model)


def test_without_sync_the_trainer_does_not_wait(pair):
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    sending, receiving = pair(model, policy, sync=False)
    sending.send(filled(model, 4))
    assert receiving.receive(timeout=WAIT)["bias"].tolist() == [4, 4]


def test_receive_without_a_timeout_has_a_deadline(pair):
    policy = nn.Linear(2, 2)
    _, receiving = pair(nn.Linear(2, 2), policy)
    receiving.timeout = 0.1
    with pytest.raises(ws.DeadlineError, match="no newer weights"):
        receiving.receive()


def test_a_scheme_in_use_is_pickled_as_it_was_made(pair, run_dir):
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    sending, _ = pair(model, policy)
    other = pickle.loads(pickle.dumps(sending))
    assert (other.scheme, other.sync, other.timeout) == (sending.scheme, True, WAIT)
    assert not other.initialized_on_sender
    other.shutdown()  # of what it never had
    sending.send(filled(model, 2))
    assert policy.bias.tolist() == [2, 2]


def test_a_policy_that_is_gone_is_said_so(pair):
    model = nn.Linear(2, 2)
    sending, _ = pair(model, nn.Linear(2, 2))  # TorchRL's schemes keep no policy alive
    gc.collect()
    with pytest.raises(ws.ReceiverError, match="the policy is gone"):
        sending.send(model)


def test_c4_a_policy_that_replaces_the_former_one_gets_the_weights(pair):
    """A collector deep-copies a worker's policy for its device, and then says so."""
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    sending, receiving = pair(model, policy)
    used = copy.deepcopy(policy)
    receiving.model = used
    sending.send(filled(model, 8))
    assert used.bias.tolist() == [8, 8]


def test_r3_an_output_is_of_one_version(pair):
    """The policy reads its weights twice, with a pause that an update would fit into."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x):
            first = self.bias.clone()
            inside.set()
            go_on.wait(WAIT)
            return torch.stack([first, self.bias.clone()])

    model, policy = filled(nn.Linear(2, 2), 1), Slow(2, 2)
    sending, _ = pair(model, policy)
    outputs = []
    computing = threading.Thread(target=lambda: outputs.append(policy(torch.ones(2))))
    computing.start()
    assert inside.wait(WAIT)
    update = threading.Thread(target=sending.send, args=(filled(nn.Linear(2, 2), 2),))
    update.start()
    update.join(0.3)
    assert update.is_alive()  # it waits for the forward pass
    go_on.set()
    computing.join(WAIT)
    update.join(WAIT)
    assert outputs[0].tolist() == [[1, 1], [1, 1]]
    assert policy.bias.tolist() == [2, 2]


def test_a_policy_whose_forward_pass_fails_still_gets_weights(pair):
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    sending, _ = pair(model, policy)
    with pytest.raises(RuntimeError, match="shape"):
        policy(torch.ones(3))
    sending.send(filled(model, 3))
    assert policy.bias.tolist() == [3, 3]


@pytest.mark.parametrize("kind", ["disk", "gloo"])
def test_any_of_our_schemes(kind, run_dir, tmp_path, made):
    ours = ws.DiskScheme(str(tmp_path / "run"))
    if kind == "gloo":
        ours = ws.NCCLScheme(num_replicas=1, backend="gloo")
    model, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    schemes = [TorchRLScheme(ours, timeout=30) for _ in range(2)]
    made.extend(schemes)
    schemes[0].init_on_sender(model_id="policy", model=model, num_workers=1)
    connect_all(schemes[0], schemes[1:], [policy])
    schemes[0].send(filled(model, 6))
    assert policy.bias.tolist() == [6, 6]
