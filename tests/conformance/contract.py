"""The contract's conformance list, in its order: each item and the tests that prove it.

Paths are relative to tests/. A test counts only if it fails where the behaviour is missing.
"""

ERRORS = "api/test_api_errors.py::"
KEYS = "api/test_api_middleware.py::"
REQUESTS = "api/test_api_requests.py::"
STREAMING = "api/test_api_streaming.py::"
LOGPROBS = "api/test_api_logprobs.py::"
CHOICES = "api/test_api_choices.py::"
LIFECYCLE = "api/test_api_lifecycle.py::"
TOOLS = "api/test_api_tools.py::"
TOOL_GRAMMAR = "api/test_tool_grammar.py::"
TOOL_FORMATS = "api/test_tool_formats.py::"
PARSER = "api/test_tool_parser.py::"
STRUCTURED = "api/test_structured_output.py::"
CONTROL = "api/test_api_control.py::"
METRICS = "api/test_api_metrics.py::"
SDK = "api/test_api_sdk.py::"
NEW = "api/test_conformance.py::"
TEXT = "engine/test_output_processor.py::"
DETOKENIZER = "engine/test_detokenizer.py::"
ENGINE = "engine/test_cases.py::"
SCORES = "engine/test_choices.py::"
SAMPLER = "worker/test_sampler.py::"
SERVER = "e2e/test_server.py::"
OPERATIONS = "e2e/test_operations.py::"

ITEMS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "each row of the table of errors gives that status, type, code, param; four keys",
        (
            NEW + "test_codes_of_the_table_are_the_servers",
            ERRORS + "test_bad_chat_field",
            ERRORS + "test_bad_messages",
            ERRORS + "test_bad_completion",
            ERRORS + "test_body_that_is_no_strict_json_object",
            ERRORS + "test_other_content_types_are_refused",
            ERRORS + "test_body_too_large_with_and_without_length",
            ERRORS + "test_wrong_path_and_method",
            ERRORS + "test_failing_template_blames_the_messages",
            ERRORS + "test_prompt_against_a_context_of_64",
            ERRORS + "test_engine_refusal_is_a_400_and_engine_failure_a_500",
            ERRORS + "test_unknown_model",
            STRUCTURED + "test_bad_constraints",
            REQUESTS + "test_strict_params_refuse_unknown_fields",
            KEYS + "test_every_other_route_needs_a_key",
            CONTROL + "test_list_shows_states_and_needs_an_admin_key",
            CONTROL + "test_cancel",
            "api/test_api_keys.py::test_requests_per_minute",
            LIFECYCLE + "test_full_queue_is_a_503",
            LIFECYCLE + "test_deadline_ends_a_whole_reply_with_504",
            LIFECYCLE + "test_everything_but_probes_is_503_while_loading",
            LIFECYCLE + "test_drain_lets_running_requests_finish",
            LIFECYCLE + "test_dead_engine",
        ),
    ),
    2: (
        "no path or traceback text in any error",
        (
            ERRORS + "test_bug_in_a_handler_is_a_500_without_details",
            ERRORS + "test_bad_chat_field",
            LIFECYCLE + "test_dead_engine",
            LIFECYCLE + "test_bug_inside_a_stream_is_an_error_frame",
        ),
    ),
    3: (
        "10 000-element bad array answers < 2 KB",
        (NEW + "test_ten_thousand_bad_elements_are_one_error",),
    ),
    4: (
        "number in a string, true for max_tokens, NaN literal, lone surrogate → 400",
        (ERRORS + "test_bad_chat_field", ERRORS + "test_body_that_is_no_strict_json_object"),
    ),
    5: (
        "413 with and without Content-Length",
        (
            ERRORS + "test_body_too_large_with_and_without_length",
            SDK + "test_body_larger_than_allowed_is_refused_before_it_is_read",
        ),
    ),
    6: (
        "401 missing, wrong, right, x-api-key, OPTIONS free, /metrics free",
        (
            KEYS + "test_every_other_route_needs_a_key",
            KEYS + "test_right_keys",
            KEYS + "test_probes_and_options_are_open",
        ),
    ),
    7: (
        "unknown model 404; retrieve with slash in the id",
        (
            ERRORS + "test_unknown_model",
            "api/test_api_models_tokenize.py::test_model_by_name_with_raw_and_quoted_slash",
        ),
    ),
    8: (
        "x-request-id echoed and generated",
        (KEYS + "test_request_id_is_echoed_or_made",),
    ),
    9: (
        "ignored header lists unknown names, strict flag rejects",
        (
            REQUESTS + "test_unknown_fields_are_listed_and_warned_of_once",
            REQUESTS + "test_strict_params_refuse_unknown_fields",
        ),
    ),
    10: (
        "SDK: chat, stream, tools helper, parse(), completions, models, with no extra client code",
        (
            SDK + "test_chat",
            SDK + "test_chat_stream",
            SDK + "test_chat_stream_helper",
            SDK + "test_completions",
            SDK + "test_models",
            TOOLS + "test_sdk_create",
            TOOLS + "test_sdk_stream_helper",
            STRUCTURED + "test_sdk_parse",
            SERVER + "test_chat_answers_in_english",
            SERVER + "test_completions_and_models",
        ),
    ),
    11: (
        "chunk order exact for text, n=3, tools, length, stop",
        (
            STREAMING + "test_chat_stream_is_role_text_finish_done",
            STREAMING + "test_completion_stream_has_no_role_and_ends_with_empty_text",
            CHOICES + "test_stream_of_several_choices",
            TOOLS + "test_calls_streamed_as_openai_does",
            NEW + "test_every_end_is_told_in_a_chunk_of_its_own_and_by_done",
        ),
    ),
    12: (
        "usage null/absent/final rules",
        (
            STREAMING + "test_usage_chunk_only_when_asked_for",
            STREAMING + "test_continuous_usage_counts_up",
        ),
    ),
    13: (
        "[DONE] present on success, absent on error",
        (
            NEW + "test_every_end_is_told_in_a_chunk_of_its_own_and_by_done",
            LIFECYCLE + "test_failure_inside_a_stream_is_one_error_frame_and_no_done",
        ),
    ),
    14: (
        "keep-alive comment appears in a queued stream",
        (
            LIFECYCLE + "test_comments_while_a_stream_waits",
            SDK + "test_headers_arrive_while_the_request_waits",
        ),
    ),
    15: (
        "concatenated stream = non-stream for 200 random prompts, several tokens a step",
        (
            STREAMING + "test_random_replies_stream_as_they_are_told_whole",
            STREAMING + "test_stream_equals_whole_reply_for_every_split",
            SERVER + "test_stream_equals_reply",
        ),
    ),
    16: (
        "emoji, CJK, combining marks, 4-byte splits: no U+FFFD, never half a character",
        (
            STREAMING + "test_stream_equals_whole_reply_for_every_split",
            DETOKENIZER + "test_half_characters_wait_for_the_token_that_completes_them",
            DETOKENIZER + "test_any_split_gives_the_text_of_the_whole",
        ),
    ),
    17: (
        "forced invalid byte token: U+FFFD only after proof",
        (DETOKENIZER + "test_replacement_only_after_proof",),
    ),
    18: (
        "max_tokens that cuts inside an emoji: tail dropped in both modes",
        (STREAMING + "test_max_tokens_inside_a_character_drops_its_tail_in_both_modes",),
    ),
    19: (
        "stop split over 2, 3, 5 tokens; overlapping; equal to first output; unfinished is flushed",
        (
            TEXT + "test_stop_split_over_tokens",
            TEXT + "test_overlapping_prefixes_fall_back_to_the_longest",
            TEXT + "test_stop_inside_a_longer_one_ends_first",
            TEXT + "test_stop_equal_to_the_first_output",
            TEXT + "test_unfinished_stop_string_is_flushed",
        ),
    ),
    20: (
        "include_stop_str",
        (TEXT + "test_included_stop_string_is_sent_as_it_comes", STREAMING + "test_stop_reasons"),
    ),
    21: (
        "stop_token_ids reason int, EOS reason null",
        (STREAMING + "test_stop_reasons", TEXT + "test_stop_token_ids"),
    ),
    22: (
        "min_tokens blocks EOS, stop ids and stop strings",
        (
            SAMPLER + "test_min_tokens_masks_eos_and_stop_ids_until_reached",
            TEXT + "test_min_tokens_blocks_matches_that_end_too_early",
        ),
    ),
    23: (
        "ignore_eos reaches max tokens",
        ("core/test_request.py::test_first_matching_stop_rule_decides",),
    ),
    24: (
        "EOS as the last allowed token → stop, not length",
        ("core/test_request.py::test_first_matching_stop_rule_decides",),
    ),
    25: (
        "P = L−1, L, L+1; max > L; clamp; strict flag; message phrase and code",
        (
            ERRORS + "test_prompt_against_a_context_of_64",
            ERRORS + "test_bad_chat_field",
            REQUESTS + "test_limits_fit_the_context",
            CONTROL + "test_strict_context",
        ),
    ),
    26: (
        "chat logprobs joined bytes = content; sorted; k = 0, 1, 20, 21 → 400",
        (
            LOGPROBS + "test_chat_entries_are_the_tokens_of_the_content",
            LOGPROBS + "test_alternatives_asked_for",
            ERRORS + "test_bad_chat_field",
            SAMPLER + "test_top_logprobs_break_ties_by_id_and_keep_minus_infinity",
        ),
    ),
    27: (
        "legacy arrays equal length; k+1 keys; first echo entry null; offsets index text",
        (
            LOGPROBS + "test_completion_arrays",
            LOGPROBS + "test_offsets_index_the_text_and_keys_of_partial_characters_differ",
            CHOICES + "test_echo_covers_the_prompt",
        ),
    ),
    28: (
        "echo with 0 and 1 tokens against a reference forward pass within 1e-3",
        (SCORES + "test_prompt_scores_equal_a_reference_forward_pass",),
    ),
    29: (
        "lm-eval style loglikelihood of 50 items equals reference ranking",
        (SCORES + "test_loglikelihoods_rank_as_the_references",),
    ),
    30: (
        "logprobs request with a warm prefix cache still returns prompt logprobs",
        (SCORES + "test_warm_prefix_cache_does_not_hide_prompt_scores",),
    ),
    31: (
        "greedy equals reference implementation token for token on CPU fp32",
        (
            "engine/test_invariance.py::test_equals_hugging_face",
            "engine/test_invariance.py::test_embedded_model_equals_hugging_face",
        ),
    ),
    32: (
        "same seed twice, alone and in a busy batch, preempted, with and without prefix hit",
        (
            ENGINE + "test_same_seed_same_tokens",
            ENGINE + "test_same_seed_same_tokens_from_a_warm_cache",
            SERVER + "test_seeded_sampling_repeats_in_a_busy_batch",
        ),
    ),
    33: (
        "n=4 seed s equals four requests s…s+3",
        (
            SCORES + "test_choices_equal_single_requests_with_the_next_seeds",
            CHOICES + "test_choices_draw_from_the_next_seeds_and_share_the_prompt",
        ),
    ),
    34: (
        "best_of ordering and usage",
        (CHOICES + "test_best_of_ranks_by_the_mean_and_counts_all",),
    ),
    35: (
        "each penalty against a hand-computed 5-token example",
        (
            SAMPLER + "test_repetition_penalty_over_prompt_and_output",
            SAMPLER + "test_frequency_penalty_counts_the_output",
            SAMPLER + "test_presence_penalty_counts_once",
        ),
    ),
    36: (
        "logit_bias ban and force; id ≥ V 400",
        (SAMPLER + "test_logit_bias", ERRORS + "test_bad_chat_field"),
    ),
    37: (
        "top_p 0, top_k 1, min_p 1 all give argmax",
        (SAMPLER + "test_filters_that_leave_one_token",),
    ),
    38: (
        "padded vocabulary ids never sampled (10 000 draws at temperature 2)",
        (SAMPLER + "test_padded_ids_are_never_sampled",),
    ),
    39: (
        "json_object always parses; 30 schemas validate; unsupported keyword names itself",
        (
            NEW + "test_json_object_is_always_an_object",
            STRUCTURED + "test_what_a_schema_allows_validates",
            STRUCTURED + "test_schemas_refused_before_anything_is_sent",
            "engine/test_grammars.py::test_random_models",
        ),
    ),
    40: (
        "regex and choice exact",
        (STRUCTURED + "test_regex_is_exact", STRUCTURED + "test_choice_is_exact"),
    ),
    41: (
        "guided_* equals structured_outputs",
        (STRUCTURED + "test_spellings_mean_the_same",),
    ),
    42: (
        "two constraints 400; compile bomb rejected without stalling other streams",
        (
            STRUCTURED + "test_refused_requests",
            STRUCTURED + "test_compile_bombs",
            STRUCTURED + "test_slow_compilations_end_and_block_nobody",
        ),
    ),
    43: (
        "Hermes and other forms: one, two, text + call, nested, braces, quotes, tags, arguments "
        "before name, unicode, empty, none, truncated by length",
        (
            PARSER + "test_what_a_text_holds",
            PARSER + "test_a_call_that_the_limit_cuts",
            PARSER + "test_what_a_text_of_another_form_holds",
            TOOL_FORMATS + "test_answers_streamed_and_not",
        ),
    ),
    44: (
        "every token split of a fixed output gives the same final calls",
        (
            PARSER + "test_all_splits_say_the_same",
            PARSER + "test_random_calls_in_random_pieces",
            TOOLS + "test_split_anywhere",
        ),
    ),
    45: (
        "none bans the tag; required always calls; named finish stop; parallel false stops after "
        "one; allowed_tools",
        (
            TOOLS + "test_none_bans_the_tag",
            TOOL_GRAMMAR + "test_required_calls_from_the_start",
            TOOL_GRAMMAR + "test_named_finishes_with_stop",
            TOOLS + "test_one_call_at_a_time",
            TOOL_GRAMMAR + "test_allowed_tools_restrict_the_names",
            TOOL_FORMATS + "test_none_bans_the_opening",
            TOOL_FORMATS + "test_required_calls_from_the_start",
            TOOL_FORMATS + "test_one_call_at_a_time",
        ),
    ),
    46: (
        "history with malformed arguments still answers",
        (
            TOOLS + "test_history_in_the_models_own_template",
            TOOLS + "test_history_in_a_template_without_tools",
        ),
    ),
    47: (
        "tool result round trip renders the expected prompt",
        (
            TOOLS + "test_history_in_the_models_own_template",
            TOOL_FORMATS + "test_calls_of_one_message_follow_each_other_in_llamas_prompt",
            TOOL_FORMATS + "test_mistrals_prompt_has_ids_of_nine_characters",
            REQUESTS + "test_chat_prompt_is_the_rendered_template",
        ),
    ),
    48: (
        "disconnect in queue, prefill, decode, non-stream, n=8: blocks back",
        (
            LIFECYCLE + "test_leaving_aborts_at_once",
            SDK + "test_closing_the_socket_aborts",
            SDK + "test_client_that_leaves_ends_all_choices",
            ENGINE + "test_blocks_come_back_whenever_requests_are_aborted",
            OPERATIONS + "test_client_that_leaves_before_the_first_token",
            SERVER + "test_client_that_leaves_frees_its_blocks",
        ),
    ),
    49: (
        "cancel endpoint",
        (
            CONTROL + "test_cancel",
            CONTROL + "test_one_cancel_ends_all_sequences_and_all_requests_of_the_id",
        ),
    ),
    50: (
        "queue full 503 + Retry-After; deadline 504; rate limit 429 headers",
        (
            LIFECYCLE + "test_full_queue_is_a_503",
            LIFECYCLE + "test_deadline_ends_a_whole_reply_with_504",
            "api/test_api_keys.py::test_requests_per_minute",
            "api/test_api_keys.py::test_tokens_per_minute",
        ),
    ),
    51: (
        "SIGTERM drain finishes a running stream, /ready 503, /live 200",
        (SERVER + "test_sigterm_drains",),
    ),
    52: (
        "engine exception in one request leaves others intact; error frame",
        (
            LIFECYCLE + "test_failure_of_one_request_leaves_others_alone",
            ENGINE + "test_not_a_number_in_the_weights_ends_requests_and_not_the_engine",
        ),
    ),
    53: (
        "/metrics parses, all P0 names exist at start, counts match a scripted workload exactly",
        (
            METRICS + "test_text_parses_and_openmetrics_is_served_when_asked_for",
            METRICS + "test_every_name_is_there_at_zero",
            METRICS + "test_counts_of_a_scripted_workload_are_exact",
            SERVER + "test_metrics_count_what_was_served",
        ),
    ),
    54: (
        "vLLM Grafana queries return data",
        (METRICS + "test_every_query_of_a_dashboard_finds_its_samples",),
    ),
    55: (
        "/tokenize + /detokenize round trip; all three client shapes",
        (
            "api/test_api_models_tokenize.py::test_round_trip_under_all_three_names",
            "api/test_api_models_tokenize.py::test_tokenize_messages_as_chat_does",
        ),
    ),
}
