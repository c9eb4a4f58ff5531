"""Predictions: what may be predicted, and where it is written."""

import itertools

import torch

from mbd_core.decoding.blocks.acceptance import FALLBACKS, LEFTMOST, MARGIN, NEG_ENTROPY, predict
from mbd_core.decoding.blocks.sampling import Vocab, margin, neg_entropy


def test_mask_and_padded_tail_are_never_predicted_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[9.0, 1.0, 1.0, 8.0], [0.0, 0.0, 0.0, 0.0]])
    for at, chunk in itertools.product((None, torch.tensor([0, 1])), (1, 2, 5)):
        prediction = predict(lambda part: logits[part], 2, at, Vocab(0, 3), shape=torch.Size((1, 1, 2)), chunk=chunk)
        assert prediction.token_RNB.flatten().tolist() == [1, 1]
        assert torch.allclose(prediction.confidence_RNB.flatten(), logits.softmax(-1)[:, 1])


def test_predictions_stand_where_they_were_asked_and_a_place_behind_the_last_is_padding() -> None:
    logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
    shape = torch.Size((1, 2, 2))
    prediction = predict(lambda part: logits[part], 3, torch.tensor([3, 1, 4]), Vocab(2, 3), shape=shape, chunk=2)
    assert prediction.token_RNB.tolist() == [[[0, 0], [0, 1]]]
    assert (prediction.confidence_RNB > 0).tolist() == [[[False, True], [False, True]]]


def test_each_position_is_scored_by_the_fallback_of_its_request() -> None:
    logits = 2.0 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    vocab, shape = Vocab(0, 6), torch.Size((1, 1, 4))
    fallback_P = torch.tensor([FALLBACKS["confidence"], LEFTMOST, MARGIN, NEG_ENTROPY])
    prediction = predict(lambda part: logits[part], 4, None, vocab, shape=shape, chunk=3, fallback_P=fallback_P)
    confidence = prediction.confidence_RNB.flatten()
    wanted = [confidence[0], confidence[1], margin(logits, vocab)[2], neg_entropy(logits)[3]]
    assert prediction.score_RNB.flatten().tolist() == [float(score) for score in wanted]
