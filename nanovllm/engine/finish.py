"""When a sequence ends, and why."""

from nanovllm.engine.detokenizer import StopChecker
from nanovllm.engine.sequence import Sequence


def finish_reason(seq: Sequence, eos_token_ids: frozenset[int]) -> str | None:
    """Why the token that just came is the last one, if it is; sets `stop_reason`."""
    if not seq.may_stop:
        return "length" if len(seq.token_ids) >= seq.max_len else None
    if seq.error is not None:
        return "error"
    params, token_id = seq.params, seq.token_ids[-1]
    may_stop = seq.num_completion_tokens > params.min_tokens
    stops_by_id = may_stop and token_id in params.stop_token_ids
    is_eos = token_id in eos_token_ids
    # A grammar lets it come only where it may end.
    ends_by_id = stops_by_id or (is_eos and (seq.grammar is not None or (may_stop and not params.ignore_eos)))
    if seq.stop_checker is not None:
        shows = params.include_stop_str_in_output or not ends_by_id  # as in `request.text_ids`
        try:
            seq.stop_reason = _find_stop_string(seq, seq.stop_checker, shows)
        except Exception as error:  # the tokenizer's own, at what this sequence alone has drawn
            seq.fail(error)
            return "error"
        if seq.stop_reason is not None:
            return "stop"
    ended = False
    if seq.grammar is not None:
        try:
            ended = seq.grammar.push(seq.completion_ids_from(seq.grammar.num_tokens))
        except Exception as error:  # as above
            seq.fail(error)
            return "error"
    if stops_by_id:
        seq.stop_reason = token_id
        return "stop"
    if may_stop and is_eos and not params.ignore_eos:
        return "stop"
    if ended:
        seq.ended_by_grammar = not is_eos
        return "stop"
    return "length" if len(seq.token_ids) >= seq.max_len else None


def _find_stop_string(seq: Sequence, checker: StopChecker, last_shows: bool) -> str | None:
    """Give the checker the tokens that it has not seen: the one that just came, after a fault all of them.

    `last_shows`: the last token belongs to the text.
    """
    new_ids = seq.completion_ids_from(checker.num_tokens)
    for token_id in new_ids if last_shows else new_ids[:-1]:
        found = checker.push([token_id], checker.num_tokens >= seq.params.min_tokens)
        if found is not None:
            return found
    return None
