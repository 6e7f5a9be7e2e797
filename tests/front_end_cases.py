"""What public bug reports about other servers ask of a front end: each case's tests, or why it has none.

A case is a kind of fault, in our words. Tests are `file::function` below this folder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One kind of fault."""

    about: str
    tests: tuple[str, ...] = ()
    left_out: str = ""


def _case(about: str, *tests: str) -> Case:
    return Case(about, tests)


_STREAMS, _REFUSALS, _LIFE = "unit/test_dpu_streams.py", "unit/test_dpu_refusals.py", "unit/test_dpu_life.py"
_COMPLETIONS, _LOGPROBS = "unit/test_dpu_completions.py", "unit/test_dpu_logprobs.py"
_BAD_WORDS = "unit/test_dpu_bad_words.py"
_PROMPT_LOGPROBS, _PROMPTS = "unit/test_dpu_prompt_logprobs.py", "unit/test_dpu_prompts.py"
_DETOKENIZE, _WHOLE, _TOOLS = "unit/test_text_detokenize.py", "unit/test_text_whole.py", "unit/test_dpu_tools.py"
_PREFIX_CACHE = "unit/test_dpu_prefix_cache.py"
_RULES, _HTTP1, _TENANTS = "property/test_rules.py", "unit/test_http1.py", "unit/test_tenants.py"
_ALL_WAYS = f"{_STREAMS}::test_every_way_of_asking_gives_the_same_text"
_RANGES = f"{_REFUSALS}::test_values_out_of_range"
_USAGE = f"{_STREAMS}::test_usage_in_streams"
_PREEMPTION = "the scheduler does not preempt: a sequence has all its blocks before it starts"

CASES: dict[str, Case] = {
    "ST1": _case(
        "a character of several tokens comes once and whole",
        f"{_STREAMS}::test_no_piece_of_a_character_is_streamed",
        f"{_DETOKENIZE}::test_an_emoji_comes_whole",
    ),
    "ST3": _case(
        "byte-fallback tokens give no temporary replacement character",
        f"{_WHOLE}::test_any_bytes_at_all",
        f"{_DETOKENIZE}::test_random_text_through_a_sentencepiece_tokenizer",
    ),
    "ST5": _case(
        "spaces of SentencePiece words survive streaming",
        f"{_DETOKENIZE}::test_word_spaces_and_byte_runs_of_sentencepiece_tokenizers",
        f"{_WHOLE}::test_spaces_of_words_stay_behind_a_prompt",
    ),
    "ST7": _case("no chunk that says nothing", _ALL_WAYS),
    "ST8": _case("the end token first", f"{_STREAMS}::test_the_end_token_first_gives_an_empty_valid_answer"),
    "SP1": _case(
        "what may become a stop string is held back",
        "unit/test_text_stops.py::test_only_what_may_become_a_stop_string_is_held",
        f"{_COMPLETIONS}::test_a_stop_string_over_four_tokens_in_a_stream",
    ),
    "SP2": _case("held text is sent once", f"{_STREAMS}::test_held_text_is_sent_once"),
    "SP5": _case(
        "stop strings of several tokens",
        f"{_STREAMS}::test_a_stop_string_over_several_tokens_is_neither_shown_nor_left_running",
    ),
    "SP6": _case("every endpoint, streamed or not, with and without stop strings", _ALL_WAYS),
    "SP8": _case("stop strings make no empty chunks", _ALL_WAYS),
    "SP9": _case("an empty stop string", _RANGES),
    "SP11": _case("stop tokens outside the vocabulary", _RANGES, f"{_RULES}::test_a_bad_submission_costs_one_record"),
    "SP13": _case(
        "no stop string before min_tokens",
        f"{_COMPLETIONS}::test_no_stop_of_any_sort_before_min_tokens",
        f"{_DETOKENIZE}::test_stop_strings_count_only_after_min_tokens",
    ),
    "SP14": _case(
        "every end token is masked before min_tokens",
        f"{_RULES}::test_stop_tokens_are_masked_until_min_tokens_are_generated",
    ),
    "SP15": _case("min_tokens before stop tokens", f"{_COMPLETIONS}::test_no_stop_of_any_sort_before_min_tokens"),
    "SE1": _case("one [DONE] for all choices", f"{_STREAMS}::test_choices_of_several_prompts_have_their_own_indices"),
    "SE2": _case("[DONE] also after a failure", f"{_STREAMS}::test_an_error_in_a_stream_is_an_event_before_done"),
    "SE5": _case(
        "clients raise on an error within a stream, and it counts as a failure",
        f"{_STREAMS}::test_a_failed_stream_counts_as_failed",
        "ecosystem/test_openai_python.py::test_openai_python",
        "ecosystem/test_openai_node.py::test_openai_node",
    ),
    "SE6": _case("a finish reason without a token", f"{_STREAMS}::test_a_length_finish_and_an_end_without_a_token"),
    "SE9": _case("an abort is no natural stop", f"{_STREAMS}::test_an_abort_by_the_device_is_no_natural_stop"),
    "SE10": _case("a fault after three chunks", "unit/test_dpu_stream_ends.py::test_a_failure_after_three_chunks"),
    "SE11": _case("framing and headers of a stream", f"{_STREAMS}::test_chunked_framing_ends_cleanly", _ALL_WAYS),
    "ER1": _case("an unknown model", f"{_REFUSALS}::test_unknown_models_and_paths"),
    "ER3": _case("a chat that is too long", f"{_REFUSALS}::test_prompts_over_the_window"),
    "ER4": _case("the message names limit and counts", f"{_REFUSALS}::test_prompt_and_answer_over_the_window"),
    "ER5": _case("a chat over the window without max_tokens", f"{_REFUSALS}::test_prompts_over_the_window"),
    "ER7": _case(
        "a default of the client that is too large; the last token of the window",
        f"{_REFUSALS}::test_prompt_and_answer_over_the_window",
        f"{_REFUSALS}::test_the_window_may_be_filled_to_the_last_token",
    ),
    "ER9": _case(
        "bodies that are no object",
        f"{_REFUSALS}::test_bodies_that_are_no_object",
        "unit/test_dpu_adverse.py::test_bodies_that_are_refused",
        "fuzz/test_front_end_fuzz.py::test_by_coverage",
    ),
    "ER10": _case(
        "a queue with a bound",
        f"{_REFUSALS}::test_a_queue_with_a_bound",
        f"{_TENANTS}::test_ten_times_the_capacity_at_once",
    ),
    "ER12": _case("probes while much is tokenised", f"{_REFUSALS}::test_health_answers_while_much_is_tokenised"),
    "ER13": _case(
        "long texts are not tokenised to their end",
        f"{_REFUSALS}::test_huge_texts_are_refused_unread",
        "unit/test_text_chat.py::test_long_texts_are_refused_by_their_beginning",
    ),
    "VA1": _case("NaN", f"{_REFUSALS}::test_numbers_that_are_none"),
    "VA3": _case("numbers as texts; errors that are JSON", f"{_REFUSALS}::test_wrong_types", _RANGES),
    "VA4": _case(
        "sums over 32 bits, whole numbers written as floats",
        f"{_REFUSALS}::test_prompt_and_answer_over_the_window",
        f"{_REFUSALS}::test_wrong_types",
    ),
    "VA6": _case("seeds over 64 bits", _RANGES, f"{_REFUSALS}::test_valid_edges"),
    "VA7": _case("bias outside the vocabulary or the range", _RANGES),
    "VA9": _case(
        "bad words, bare and behind a space",
        f"{_BAD_WORDS}::test_single_tokens_are_banned_bare_and_behind_a_space",
        f"{_BAD_WORDS}::test_words_of_several_tokens_are_banned_as_sequences",
    ),
    "VA11": _case("a million choices", _RANGES),
    "VA13": _case(
        "tiny temperatures are greedy",
        f"{_STREAMS}::test_what_the_device_is_asked",
        "unit/test_kernels_sampling.py::test_greedy",
    ),
    "TK1": _case("empty prompts", f"{_PROMPTS}::test_empty_prompts_where_the_tokenizer_adds_no_bos", _RANGES),
    "TK2": _case("negative tokens", _RANGES),
    "TK4": _case("the first token outside the vocabulary", _RANGES, f"{_REFUSALS}::test_valid_edges"),
    "TK6": _case(
        "several prompts with several choices",
        f"{_STREAMS}::test_choices_of_several_prompts_have_their_own_indices",
    ),
    "TK8": _case("one BOS", "unit/test_text_chat.py::test_same_ids_as_apply_chat_template"),
    "TK10": _case(
        "control text of a user",
        "unit/test_text_chat.py::test_control_text_of_a_user_stays_text",
        "unit/test_chat_templates.py::test_control_text_from_outside_stays_text",
    ),
    "LP1": _case("an echo of nothing generated", f"{_PROMPT_LOGPROBS}::test_nothing_generated"),
    "LP2": _case(
        "scores of a prompt as lm-eval reads them",
        f"{_PROMPT_LOGPROBS}::test_as_lm_eval_asks",
        "ecosystem/test_lm_eval.py::test_completions",
    ),
    "LP4": _case(
        "minus infinity in JSON",
        f"{_LOGPROBS}::test_what_json_does_not_have",
        f"{_PROMPT_LOGPROBS}::test_what_json_does_not_have",
    ),
    "LP6": _case(
        "echoed tokens join to the text",
        f"{_PROMPT_LOGPROBS}::test_tokens_join_to_the_text_and_offsets_find_them_in_it",
    ),
    "LP7": _case(
        "each likely token by itself, with its bytes",
        f"{_LOGPROBS}::test_the_bytes_of_a_character_come_with_it",
        "unit/test_text_places.py::test_bytes_of_a_byte_level_vocabulary",
    ),
    "LP8": _case("prompt_logprobs is a full list", f"{_PROMPT_LOGPROBS}::test_the_field_of_its_own"),
    "NB1": _case(
        "the last chunk has its choice's index",
        f"{_STREAMS}::test_choices_of_several_prompts_have_their_own_indices",
    ),
    "NB2": _case("choices stay apart through other packages", "ecosystem/test_frameworks.py::test_litellm"),
    "US1": _case("no usage where it was not asked for", _USAGE),
    "US2": _case("usage once, at the end", _USAGE),
    "US4": _case(
        "cached tokens of several prompts",
        f"{_PREFIX_CACHE}::test_cached_tokens_of_several_prompts_are_summed",
        f"{_PREFIX_CACHE}::test_a_prompt_that_one_of_its_choices_had_to_compute_was_not_cached",
    ),
    "AB1": _case("a client that goes", f"{_LIFE}::test_a_client_that_goes_frees_its_sequences"),
    "AB2": _case(
        "a client that goes before a whole answer",
        f"{_LIFE}::test_a_client_that_goes_while_it_waits",
        f"{_HTTP1}::test_a_client_that_goes_in_any_way_frees_its_sequences",
    ),
    "AB5": _case("storms of aborts", f"{_HTTP1}::test_a_storm_of_aborts_leaves_nothing_behind"),
    "AB7": _case(
        "a front end that dies",
        "e2e/test_life.py::test_a_stopped_front_end_loses_its_lease",
        f"{_RULES}::test_a_lease_without_heartbeat_expires",
    ),
    "KV1": _case(
        "equal hashes of unequal content", "property/test_colliding_keys.py::test_no_prefix_is_taken_for_another"
    ),
    "KV3": _case(
        "the same prompt twice, from the cache",
        "e2e/test_prefix_cache.py::test_answers_are_the_same_from_the_cache_and_without",
        "property/test_histories.py::test_core_and_twin_agree_in_short_histories",
    ),
    "KV5": _case(
        "salts and names in one space of keys",
        f"{_PREFIX_CACHE}::test_tenants_share_with_nobody_else",
        "property/test_prefix_rules.py::test_only_the_same_salt_shares",
    ),
    "KV6": Case("tokens after preemption", left_out=_PREEMPTION),
    "KV7": Case("a livelock of preemptions", left_out=_PREEMPTION),
    "KV8": Case("preempted answers are complete", left_out=_PREEMPTION),
    "DE1": _case(
        "the same tokens alone and in company",
        "e2e/test_default_model.py::test_32_streams_equal_the_same_requests_alone",
    ),
    "DE3": _case(
        "a seed under load",
        "e2e/test_default_model.py::test_seeded_sampling_repeats_under_load",
        f"{_COMPLETIONS}::test_a_seed_means_the_same_under_load",
    ),
    "CH1": _case(
        "parts for templates that take texts only",
        "unit/test_chat_templates.py::test_text_parts_are_joined_for_other_templates",
    ),
    "CH3": _case("an empty system message", f"{_REFUSALS}::test_messages_that_are_served"),
    "CH4": _case("results of tools as parts", f"{_TOOLS}::test_results_of_tools"),
    "TC1": _case("ids and names of calls in streams", f"{_TOOLS}::test_calls_of_hermes"),
    "TC2": _case("a forced call ends as a call", f"{_TOOLS}::test_a_named_function_is_called"),
    "OP1": _case(
        "a device that is gone",
        "e2e/test_life.py::test_a_chain_that_dies",
        f"{_LIFE}::test_a_device_that_says_it_has_ended_counts_at_once",
    ),
    "OP2": _case("a device that is silent", f"{_LIFE}::test_a_silent_device_fails_readiness_and_open_requests"),
    "OP5": _case("probes under load", f"{_REFUSALS}::test_health_answers_while_much_is_tokenised"),
    "OP6": _case(
        "connections are kept long and closed with notice",
        f"{_REFUSALS}::test_an_idle_connection_is_kept_for_the_chosen_time",
        "unit/test_dpu_workers.py::test_answers_at_the_end_close_their_connections",
    ),
    "OP8": _case(
        "SIGTERM under load",
        f"{_LIFE}::test_sigterm_finishes_what_runs_and_refuses_what_comes",
        "e2e/test_life.py::test_sigterm_at_load",
    ),
    "OP9": _case("new certificates", "unit/test_tls.py::test_a_new_certificate_is_taken_up_and_a_bad_one_is_not"),
    "MT1": _case(
        "names of metrics are frozen", "unit/test_dpu_metrics.py::test_names_types_labels_and_units_are_frozen"
    ),
    "MT2": Case("queries of dashboards", left_out="no dashboards are shipped yet"),
    "SC1": _case("every route without a key", f"{_TENANTS}::test_every_route_needs_a_key_except_probes"),
    "SC3": _case("keys are compared in constant time", "unit/test_key_comparison.py::test_only_digests_are_compared"),
}
