"""The replayed cases: public bugs of systems that do the same job, and the tests that replay them.

Each id has tests, or a reason why there is none (NOT_TESTED). Where the contract decides otherwise
than the case's preferred answer, the contract holds.
"""

from contract import (
    CHOICES,
    DETOKENIZER,
    ENGINE,
    ERRORS,
    KEYS,
    LIFECYCLE,
    LOGPROBS,
    METRICS,
    NEW,
    OPERATIONS,
    PARSER,
    REQUESTS,
    SAMPLER,
    SCORES,
    SDK,
    SERVER,
    STREAMING,
    STRUCTURED,
    TEXT,
    TOOL_GRAMMAR,
    TOOLS,
)

POOL = "core/test_block_pool.py::"
CACHE = "core/test_kv_cache_manager.py::"
SCHEDULER = "core/test_scheduler.py::"
REQUEST = "core/test_request.py::"
PROCESS = "engine/test_process.py::"
INVARIANCE = "engine/test_invariance.py::"
LOADING = "models/test_loading.py::"
CONFIG = "models/test_model_config.py::"
PARITY = "models/test_parity.py::"
ROTARY = "layers/test_rotary.py::"
TOKENIZER = "test_tokenizer.py::"
TEMPLATE = "api/test_chat_template.py::"

CASES: dict[str, tuple[str, ...]] = {
    # --- protocol and stream framing ---
    "C001": (
        STREAMING + "test_usage_chunk_only_when_asked_for",
        CHOICES + "test_stream_of_several_choices",
    ),
    "C002": (
        STREAMING + "test_usage_chunk_only_when_asked_for",
        ERRORS + "test_bad_chat_field",  # stream_options without stream is a 400
    ),
    "C004": (
        CHOICES + "test_role_comes_even_where_no_text_does",
        STREAMING + "test_stream_without_any_text_still_opens_with_the_role",
    ),
    "C005": (CHOICES + "test_stream_of_several_choices",),
    "C006": (
        NEW + "test_every_end_is_told_in_a_chunk_of_its_own_and_by_done",
        NEW + "test_parser_that_fails_ends_the_stream_as_an_error",
        TOOLS + "test_calls_streamed_as_openai_does",
    ),
    "C007": (
        LIFECYCLE + "test_failure_inside_a_stream_is_one_error_frame_and_no_done",
        SDK + "test_error_inside_a_stream_raises",
    ),
    "C009": (
        TOOLS + "test_no_key_without_a_call",
        NEW + "test_no_key_of_calls_in_the_turn_after_a_tool_result",
    ),
    "C011": (TOOLS + "test_calls_streamed_as_openai_does", TOOLS + "test_split_anywhere"),
    "C014": (
        STREAMING + "test_no_event_before_the_first_token",
        SCHEDULER + "test_long_prompt_is_chunked_and_samples_once",
    ),
    # --- detokenising and stop strings ---
    "C015": (
        DETOKENIZER + "test_half_characters_wait_for_the_token_that_completes_them",
        STREAMING + "test_stream_equals_whole_reply_for_every_split",
    ),
    "C017": (DETOKENIZER + "test_invalid_bytes_flow_and_do_not_slow_down",),
    "C018": (TEXT + "test_no_part_of_a_stop_string_leaks",),
    "C019": (TEXT + "test_stop_need_not_end_on_a_token_edge",),
    "C022": (
        TEXT + "test_earliest_match_wins_and_a_split_character_completes_it_at_once",
        TEXT + "test_stop_inside_a_longer_one_ends_first",
    ),
    "C023": (
        TEXT + "test_leading_space_in_a_stop_string",
        DETOKENIZER + "test_leading_space_of_sentencepiece",
    ),
    "C025": (
        TEXT + "test_special_tokens_are_hidden_by_default",
        TEXT + "test_special_tokens_have_entries",
    ),
    "C026": (
        TEXT + "test_stop_string_that_is_a_special_token",
        TEXT + "test_stop_string_around_a_hidden_special_token",
    ),
    "C027": (TEXT + "test_text_of_the_end_token_is_never_returned",),
    # --- log probabilities ---
    "C028": (
        NEW + "test_chat_logprobs_of_a_split_character_join_to_the_text_when_streamed",
        LOGPROBS + "test_partial_characters_are_escaped_with_their_true_bytes",
        TEXT + "test_entries_carry_true_bytes",
    ),
    "C029": (LOGPROBS + "test_token_text_is_not_the_vocabulary_spelling",),
    "C031": (
        LOGPROBS + "test_alternatives_asked_for",
        LOGPROBS + "test_completion_arrays",
        ERRORS + "test_bad_chat_field",
    ),
    "C032": (
        CHOICES + "test_echo_covers_the_prompt",
        SCORES + "test_prompt_scores_equal_a_reference_forward_pass",
    ),
    "C033": (
        CHOICES + "test_echo_covers_the_prompt",
        CHOICES + "test_echo_of_a_full_context",
        SCORES + "test_full_context_can_be_scored",
    ),
    "C035": (SAMPLER + "test_logprobs_are_of_the_raw_logits",),
    # --- request validation ---
    "C037": (
        ERRORS + "test_body_that_is_no_strict_json_object",
        ERRORS + "test_bad_chat_field",
    ),
    "C039": (
        ERRORS + "test_bad_chat_field",
        REQUESTS + "test_any_top_k_crosses_to_the_engine",
        SAMPLER + "test_filters_that_leave_one_token",
        SAMPLER + "test_greedy_takes_the_lowest_of_the_best",
        CHOICES + "test_greedy_choices_run_once_and_are_copied",
    ),
    "C040": (ERRORS + "test_bad_chat_field",),
    "C042": (ERRORS + "test_prompt_against_a_context_of_64",),
    "C043": (REQUESTS + "test_limits_fit_the_context",),
    "C044": (
        REQUESTS + "test_newer_name_of_the_limit_wins",
        STREAMING + "test_stop_reasons",
    ),
    "C046": (
        CHOICES + "test_null_and_integral_n",  # 1.0 is an integer by the contract
        ERRORS + "test_bad_chat_field",
        ERRORS + "test_bad_completion",
    ),
    "C048": (ERRORS + "test_bad_chat_field", SAMPLER + "test_logit_bias"),
    "C050": (
        ERRORS + "test_bad_completion",
        REQUESTS + "test_prompt_shapes_mean_the_same",
    ),
    "C051": (
        ERRORS + "test_bad_completion",  # "" is a 400 for every model by the contract
        REQUESTS + "test_chat_prompt_is_the_rendered_template",
    ),
    "C053": (
        REQUESTS + "test_null_means_not_given",
        REQUESTS + "test_unknown_fields_are_listed_and_warned_of_once",
    ),
    # --- paged KV, prefix cache, preemption, chunks ---
    "C054": (
        INVARIANCE + "test_prefix_hits_do_not_change_a_token",
        SCHEDULER + "test_repeated_prompt_gets_the_same_answer",
        CACHE + "test_at_least_one_token_is_recomputed",
    ),
    "C056": (
        POOL + "test_reused_block_is_not_found_under_its_old_hash",
        CACHE + "test_recycled_blocks_answer_for_their_new_contents_only",
    ),
    "C057": (
        POOL + "test_reference_counts_and_shared_blocks",
        CACHE + "test_table_covers_exactly_the_tokens",
        CACHE + "test_free_in_every_order_returns_everything",
    ),
    "C060": (
        REQUEST + "test_unlike_blocks_have_unlike_hashes",
        REQUEST + "test_hash_covers_the_parent_and_the_salt",
    ),
    "C061": (
        ENGINE + "test_preempted_request_continues_as_if_nothing_happened",
        ENGINE + "test_text_of_a_stream_equals_the_text_of_its_tokens",
    ),
    "C063": (ENGINE + "test_stop_strings_do_not_spoil_the_prefix_cache",),
    "C065": (ENGINE + "test_chunk_size_does_not_change_the_answer",),
    "C066": (
        ENGINE + "test_blocks_come_back_whenever_requests_are_aborted",
        SCHEDULER + "test_no_block_is_lost_whenever_requests_are_aborted",
    ),
    "C067": (
        SCORES + "test_choices_equal_single_requests_with_the_next_seeds",
        CHOICES + "test_stream_of_several_choices",
        CACHE + "test_forks_share_all_blocks_and_the_last_holder_writes_in_place",
    ),
    # --- scheduling, aborts, hangs ---
    "C068": (
        ENGINE + "test_prompt_larger_than_the_pool",
        ERRORS + "test_prompt_that_can_never_fit_the_pool_is_refused_before_the_stream_begins",
    ),
    "C069": (
        SCHEDULER + "test_big_request_at_the_head_lets_some_small_ones_pass",
        SCHEDULER + "test_endless_stream_of_small_requests_does_not_starve_a_big_one",
    ),
    "C071": (SCHEDULER + "test_decodes_come_first_and_are_never_short_of_budget",),
    "C072": (
        SERVER + "test_client_that_leaves_frees_its_blocks",
        OPERATIONS + "test_client_that_leaves_before_the_first_token",
        ENGINE + "test_blocks_come_back_whenever_requests_are_aborted",
    ),
    "C075": (
        PROCESS + "test_exception_in_a_step_ends_all_streams",
        SCHEDULER + "test_every_request_is_in_exactly_one_place_between_calls",
    ),
    "C076": (
        NEW + "test_one_id_for_three_requests",
        REQUESTS + "test_engine_ids_are_the_servers_own",
        SCHEDULER + "test_duplicate_live_id_is_refused_and_ids_may_be_used_again",
    ),
    "C078": (SCHEDULER + "test_no_preemption_when_the_pool_is_big_enough",),
    # --- model numerics ---
    "C079": (
        ROTARY + "test_llama3_bands",
        ROTARY + "test_tables_equal_transformers_far_out",
        PARITY + "test_logits_equal_transformers",
    ),
    "C080": (
        CONFIG + "test_scaling_under_every_name",
        CONFIG + "test_unscaled",
        CONFIG + "test_unknown_scaling_is_refused_by_name",
    ),
    "C082": (
        ROTARY + "test_yarn_default_attention_factor",
        PARITY + "test_logits_equal_transformers",
        CONFIG + "test_context_limits",
    ),
    "C083": (PARITY + "test_decoding_one_by_one_equals_recomputing",),
    "C085": (
        PARITY + "test_logits_equal_transformers",
        PARITY + "test_biases_matter",
        "attention/test_torch_blockwise.py::test_head_layouts",
    ),
    "C087": (
        CONFIG + "test_end_tokens_are_united",
        REQUEST + "test_first_matching_stop_rule_decides",
    ),
    "C088": (
        CONFIG + "test_generation_defaults",
        REQUESTS + "test_model_defaults_lie_under_the_request",
        OPERATIONS + "test_models_defaults_apply_unless_switched_off",
    ),
    "C090": (
        INVARIANCE + "test_equals_hugging_face",
        INVARIANCE + "test_no_setting_changes_a_token",
    ),
    # --- loading ---
    "C091": (LOADING + "test_spare_head_of_a_tied_model",),
    "C093": (
        LOADING + "test_missing_shard",
        LOADING + "test_tensor_missing_from_the_index",
        LOADING + "test_wrong_shape",
        SERVER + "test_any_failure_while_loading_ends_the_process",
    ),
    "C095": (LOADING + "test_truncated_safetensors",),
    "C096": (
        LOADING + "test_dtype_key",
        LOADING + "test_mixed_dtypes_become_one",
        ENGINE + "test_one_working_dtype",
    ),
    "C097": (
        TOKENIZER + "test_template_file_wins_over_the_config",
        TOKENIZER + "test_named_templates",
    ),
    "C098": (
        NEW + "test_model_without_a_template",
        TEMPLATE + "test_no_template",
    ),
    "C101": (
        PARITY + "test_gguf_equals_safetensors",
        TOKENIZER + "test_gguf_splits",
    ),
    # --- structured output and tools ---
    "C102": (
        STRUCTURED + "test_schemas_refused_before_anything_is_sent",
        STRUCTURED + "test_bad_constraints",
    ),
    "C103": (
        STRUCTURED + "test_schemas_refused_before_anything_is_sent",
        STRUCTURED + "test_what_a_schema_allows_validates",
        STRUCTURED + "test_bounds_hold",
    ),
    "C105": (
        STRUCTURED + "test_spaces_and_digits_end",
        "core/test_scheduler_grammars.py::test_the_end_of_a_grammar_ends_the_request",
    ),
    "C106": (
        STRUCTURED + "test_spaces_and_digits_end",
        NEW + "test_json_object_is_always_an_object",
    ),
    "C108": (
        TOOLS + "test_split_anywhere",
        PARSER + "test_all_splits_say_the_same",
        TOOLS + "test_no_key_without_a_call",
    ),
    "C110": (PARSER + "test_what_a_text_holds",),
    "C112": (
        TOOLS + "test_none_bans_the_tag",
        TOOLS + "test_refused",
        TOOL_GRAMMAR + "test_named_finishes_with_stop",
        TOOL_GRAMMAR + "test_required_calls_from_the_start",
    ),
    # --- performance ---
    "C113": (
        NEW + "test_prompts_are_made_off_the_event_loop",
        LIFECYCLE + "test_tokenising_does_not_stop_the_loop",
        ERRORS + "test_absurd_text_is_refused_without_tokenising_it",
        TOKENIZER + "test_encoding_lets_other_threads_run",
    ),
    "C114": (
        SAMPLER + "test_filters_equal_a_sort",
        SAMPLER + "test_nothing_is_sorted_when_nobody_filters",
        SAMPLER + "test_plain_greedy_rows_build_no_tensor",
    ),
    "C117": (SCORES + "test_logits_of_a_long_prompt_come_in_slices",),
    "C118": (REQUEST + "test_only_new_blocks_are_hashed_and_hashing_is_cheap",),
    "C119": (
        SCHEDULER + "test_planning_looks_at_a_bounded_part_of_the_queue",
        SCHEDULER + "test_cost_of_a_step_and_of_an_abort_does_not_grow_with_the_queue",
        ENGINE + "test_a_long_queue_is_not_looked_through_in_every_step",
    ),
    # --- security ---
    "C120": (ERRORS + "test_content_that_is_not_text_is_refused_and_never_fetched",),
    "C121": (
        ERRORS + "test_bad_chat_field",
        TEMPLATE + "test_variables_that_the_server_owns",
        TEMPLATE + "test_rendering_stops_at_the_time_limit",
        TEMPLATE + "test_a_template_of_the_request_is_bounded",
        REQUESTS + "test_templates_of_requests_are_rendered_if_trusted",
        REQUESTS + "test_template_arguments_reach_the_template",
    ),
    "C123": (
        NEW + "test_control_tokens_in_a_message_are_parsed",
        NEW + "test_control_tokens_in_a_message_stay_text_if_asked_for",
    ),
    "C125": (
        OPERATIONS + "test_oversized_requests_take_no_memory",
        ERRORS + "test_bad_chat_field",
        SDK + "test_body_larger_than_allowed_is_refused_before_it_is_read",
    ),
    "C127": (
        PARSER + "test_reads_each_character_once",
        STRUCTURED + "test_patterns_that_backtracking_engines_choke_on",
        NEW + "test_stop_strings_are_literal",
    ),
    "C129": (
        KEYS + "test_every_other_route_needs_a_key",
        KEYS + "test_right_keys",
        "api/test_api_keys.py::test_secrets_appear_nowhere",
    ),
    "C130": (
        ERRORS + "test_unknown_model",
        "api/test_api_models_tokenize.py::test_model_that_is_not_served",
        METRICS + "test_clients_cannot_make_series",
    ),
    # --- operations ---
    "C131": (
        SERVER + "test_sigterm_drains",
        OPERATIONS + "test_what_does_not_end_in_the_drain_time_gets_an_error",
        LIFECYCLE + "test_requests_beyond_the_drain_time_get_an_error_frame",
    ),
    "C132": (
        SERVER + "test_interrupts_of_the_whole_group",
        SERVER + "test_sigterm_with_nothing_to_drain_leaves_at_once",
        OPERATIONS + "test_signals_to_the_whole_group_during_the_load",
        OPERATIONS + "test_second_signal_during_the_load_leaves_at_once",
    ),
    "C134": (
        SERVER + "test_health_is_503_while_loading_and_unknown_work_is_refused",
        LIFECYCLE + "test_everything_but_probes_is_503_while_loading",
    ),
    "C135": (
        SERVER + "test_killed_engine_ends_streams_and_the_server",
        OPERATIONS + "test_stuck_engine_fails_liveness_and_may_recover_or_be_told_to_leave",
        LIFECYCLE + "test_stalled_engine_fails_liveness_and_an_idle_one_does_not",
    ),
    "C137": (
        METRICS + "test_clients_cannot_make_series",
        METRICS + "test_label_values_are_escaped",
    ),
    "C139": (
        SERVER + "test_taken_port_fails_before_anything_is_loaded",
        SERVER + "test_port_is_free_again_at_once",
        SERVER + "test_impossible_flags_name_the_flag",
        OPERATIONS + "test_ipv6_host_and_the_port_it_chose",
        OPERATIONS + "test_host_that_is_not_ours",
    ),
    "C140": (OPERATIONS + "test_several_front_workers_are_refused",),
}

# What a case asks that no test here can show, and why. The rest of the case is in CASES.
NOT_TESTED: dict[str, str] = {}
# Cases of which some part is proven elsewhere or not at all.
PARTLY: dict[str, str] = {
    "C082": "its CUDA kernel: scripts/ compare logits on a GPU, kernels/ run it interpreted",
    "C090": "bfloat16 on a GPU: scripts/ compare logprobs there, the CPU promise is float32",
}
