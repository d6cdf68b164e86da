"""Each defence named on docs/security.md that these tests know is taken away, one at a time: a test
must notice."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLOWER = "silos"
CRAFTED = "tests/silos/across/test_crafted_features.py"
RECORDS = "tests/silos/across/test_records_in_sums.py"
PRIVATE = "tests/silos/across/test_private_sums.py"
AVERAGES = "tests/silos/across/test_secure_averages.py"
EVALUATING = "tests/silos/across/test_evaluating.py"
HARNESS = "tests/silos/across/test_harness.py"
APPROVAL = "tests/silos/test_approval.py"
LOG = "tests/silos/test_participation.py"
SUPERNODE = "tests/silos/test_supernode.py"
DEFENCES = {
    "the result is models only": (
        "core/engine/drive.py",
        "return live_refs(self.models)",
        "return live_refs(self.end)",
        "tests/silos/across/test_attacks.py::test_sums_that_the_last_state_names_are_no_result",
    ),
    "a chain ends without sums": (
        "methods/exact/fedgram.py",
        "totals=s.totals if self.personal else None",
        "totals=s.totals",
        "tests/runs/test_reruns.py::test_the_last_state_of_a_run_has_no_sums",
    ),
    "the level of a silo": (
        f"{FLOWER}/silo/policy.py",
        "if not levels.allows(limits.level, wanted):",
        "if False:",
        f"{CRAFTED}::test_a_run_above_the_level_of_a_silo_is_refused_with_the_line_to_write",
    ),
    "nobody chooses the features": (
        f"{FLOWER}/silo/levels.py",
        'method.chosen_by != "party"',
        "True",
        f"{CRAFTED}::test_a_run_above_the_level_of_a_silo_is_refused_with_the_line_to_write",
    ),
    "min_active": (
        f"{FLOWER}/silo/levels.py",
        "method.least >= least",
        "True",
        f"{CRAFTED}::test_a_run_above_the_level_of_a_silo_is_refused_with_the_line_to_write",
    ),
    "one version of the samples": (
        f"{FLOWER}/silo/told.py",
        "if before.get(what, value) == value or",
        "if True or",
        "tests/silos/test_told.py::test_the_difference_of_two_runs_is_a_patient_and_is_refused",
    ),
    "sums of all silos": (
        f"{FLOWER}/silo/tasks.py",
        "if ask.members and policy.binds_members(run.file, run.terms):",
        "if False:",
        "tests/silos/test_told.py::test_a_silo_gives_its_part_to_sums_of_all_silos",
    ),
    "a silo is not alone": (
        f"{FLOWER}/silo/silo_file.py",
        "max(2, len(known))",
        "len(known)",
        "tests/silos/across/test_attacks.py::"
        "test_a_silo_that_knows_nobody_takes_part_alone_only_if_its_file_says_so",
    ),
    "sums of models of all silos": (
        f"{FLOWER}/silo/policy.py",
        'return file.limits.level != "all" and not',
        'return file.limits.level == "sums" and not',
        f"{AVERAGES}::test_sums_of_models_are_of_all_silos_at_the_level_of_models",
    ),
    "sums of models among one list of silos": (
        f"{FLOWER}/silo/policy.py",
        "if not method.gives_sums:",
        "if True:",
        f"{AVERAGES}::test_sums_of_models_of_the_same_samples_are_among_one_list_of_silos",
    ),
    "exact counts of one version of test samples": (
        f"{FLOWER}/silo/policy.py",
        'same = {"rows": part.digest.hex()}',
        "same = dict[str, str]()",
        f"{EVALUATING}::test_a_sample_in_the_difference_of_two_exact_tables_is_refused",
    ),
    "exact counts among one list of silos": (
        f"{FLOWER}/silo/policy.py",
        'same["members"] = ", ".join(sorted(members))',
        "pass",
        f"{EVALUATING}::test_with_and_without_one_silo_is_refused",
    ),
    "exact counts are allowed by the file": (
        f"{FLOWER}/silo/budget.py",
        "if not limits.exact_evaluation:",
        "if False:",
        f"{EVALUATING}::test_exact_counts_are_for_silos_whose_files_say_so",
    ),
    "few numbers about few samples": (
        f"{FLOWER}/silo/tasks.py",
        "if not least or not numbers:",
        "if numbers:",
        f"{HARNESS}::test_mixtures_show_one_sample_in_k_at_most",
    ),
    "few numbers in all rounds together": (
        f"{FLOWER}/silo/told.py",
        "told = sum(map(int, tasks.values()))",
        "told = numbers",
        f"{HARNESS}::test_moments_of_layers_show_one_sample_in_k_at_most",
    ),
    "few numbers in all runs together": (
        f"{FLOWER}/silo/tasks.py",
        'f"numbers about {part.digest.hex()[:32]}"',
        'f"numbers about {self.run.terms.run}"',
        f"{HARNESS}::test_several_runs_show_one_sample_in_k_at_most_together",
    ),
    "nobody chooses the model": (
        f"{FLOWER}/silo/tasks.py",
        'if method.chosen_by == "nobody":',
        "if False:",
        "tests/silos/test_silo.py::test_no_model_is_taken_where_a_method_says_that_nobody_chooses_it",
    ),
    "an approval is for its plan": (
        f"{FLOWER}/silo/approval.py",
        "return plan == digest(file, terms) and _is_open",
        "return _is_open",
        f"{APPROVAL}::test_an_approval_that_says_something_else_than_its_plan_is_none",
    ),
    "an approval ends": (
        f"{FLOWER}/silo/approval.py",
        "return plan == digest(file, terms) and _is_open(date.fromisoformat(self.until))",
        "return plan == digest(file, terms)",
        f"{APPROVAL}::test_a_run_ends_with_the_last_day_of_its_approval",
    ),
    "a rule ends": (
        f"{FLOWER}/silo/approval.py",
        "not terms.measures and _is_open(until)",
        "not terms.measures",
        f"{APPROVAL}::test_a_rule_agrees_to_plans_until_its_last_day",
    ),
    "a key that others can read": (
        f"{FLOWER}/trust/keys.py",
        'if os.name == "posix" and mode & 0o077:',
        "if False:",
        "tests/silos/test_keys.py::test_a_key_that_other_users_can_read_is_not_used",
    ),
    "files that hold no text": (
        "core/base/files.py",
        "    except UnicodeDecodeError as error:\n        raise UserError(",
        "    except ZeroDivisionError as error:\n        raise UserError(",
        "tests/core/base/test_files.py::test_text_of_others_is_read_within_bounds",
    ),
    "hard links": (
        "core/engine/folder.py",
        "or (path.is_file() and path.stat().st_nlink > 1)",
        "",
        "tests/core/engine/test_folder.py::"
        "test_a_hard_link_in_a_run_folder_changes_no_file_elsewhere",
    ),
    "the command of another program": (
        "core/engine/folder.py",
        "list(errors.typed)",
        "__import__('sys').argv",
        "tests/core/engine/test_folder.py::test_a_run_folder_holds_no_command_of_another_program",
    ),
    "a task is declared": (
        f"{FLOWER}/silo/policy.py",
        "if gives_of(method, task) is None:",
        "if False:",
        f"{CRAFTED}::test_what_a_method_does_not_declare_no_silo_does",
    ),
    "errors say nothing of samples": (
        f"{FLOWER}/silo/silo.py",
        'reason = f"it failed with {type(error).__name__}; its own log says why"',
        "reason = str(error)",
        "tests/silos/test_silo.py::test_what_an_error_says_of_a_sample_stays_at_the_silo",
    ),
    "few values that differ": (
        "readers/moments.py",
        "if few:",
        "if False:",
        "tests/silos/test_told.py::test_few_values_that_differ_are_not_told",
    ),
    "no sum with too little noise": (
        f"{FLOWER}/silo/tasks.py",
        "fewest = max(least, dp.honest if dp else 1)",
        "fewest = least",
        f"{PRIVATE}::test_nobody_opens_a_sum_with_less_noise_than_was_promised",
    ),
    "allowed values": (
        f"{FLOWER}/silo/policy.py",
        "not in allowed:",
        "== object():",
        f"{CRAFTED}::test_a_silo_allows_values_of_hyperparameters",
    ),
    "plans are approved": (
        f"{FLOWER}/silo/silo.py",
        "    approval.check,",
        "   ",
        "tests/silos/test_approval.py::test_an_approval_is_used_by_one_run",
    ),
    "an approval is used once": (
        f"{FLOWER}/silo/silo.py",
        "                approval.take(self._file, terms)\n",
        "",
        "tests/silos/test_approval.py::test_two_runs_at_once_do_not_share_an_approval",
    ),
    "an approval is for one coordinator": (
        f"{FLOWER}/silo/approval.py",
        "file.link.address, link, query]",
        "query]",
        "tests/silos/test_approval.py::test_an_approval_is_for_one_coordinator",
    ),
    "a known key is not replaced": (
        f"{FLOWER}/silo/silo_file.py",
        "and name not in replace:",
        "and not name:",
        "tests/silos/across/test_enrolment.py::test_a_coordinator_does_not_replace_a_key_that_a_silo_knows",
    ),
    "a revoked key is refused": (
        f"{FLOWER}/superlink.py",
        "if self._read[path.stem][1] == public:",
        "if self._read[path.stem][1] or True:",
        "tests/silos/across/test_enrolment.py::test_a_revoked_key_is_refused_at_once",
    ),
    "a monitor opens few connections": (
        f"{FLOWER}/ports.py",
        "self.loop.call_later(seconds, self.expire)",
        "pass",
        "tests/silos/test_metrics.py::test_slow_and_many_connections_are_closed",
    ),
    "features are the silo's own": (
        "methods/exact/blocks/fixed_features.py",
        "if not all(a.equal(b) for a, b in zip(own, settled, strict=False)):",
        "if not own and settled is None:",
        f"{CRAFTED}::test_scales_of_patches_are_those_of_the_silos_own_images",
    ),
    "rare classes are left out": (
        "methods/exact/blocks/fixed_features.py",
        "part.class_counts(classes)[part.y] >= self.min_active",
        "part.class_counts(classes)[part.y] >= 0",
        f"{CRAFTED}::test_colluding_silos_read_no_image_from_sums_of_seeded_features",
    ),
    "sums have noise": (
        "core/training/gram.py",
        "part.long().cpu() + drawn(s, part.numel()).view(part.shape)",
        "part.long().cpu()",
        f"{PRIVATE}::test_two_of_three_silos_that_know_the_seed_do_not_see_behind_the_noise_of_the_third",
    ),
    "a run passes its checks before it is bound": (
        f"{FLOWER}/silo/participation.py",
        "first = not admission.bound",
        "first = not admission.folder.exists()",
        f"{CRAFTED}::test_no_message_lets_a_run_pass_the_checks_of_its_first_one",
    ),
    "rows of tables allow few features": (
        f"{FLOWER}/silo/policy.py",
        "if part.samples.x.ndim == 2:",
        "if part.samples.x.ndim == 7:",
        f"{RECORDS}::test_sums_of_a_table_are_all_its_rows_unless_there_are_few",
    ),
    "few features of few samples": (
        f"{FLOWER}/silo/policy.py",
        "    if 0 < most < width:",
        "    if most < 0:",
        f"{CRAFTED}::test_sums_of_too_many_features_are_refused",
    ),
    "few class means of few samples": (
        f"{FLOWER}/silo/policy.py",
        "return isinstance(agreed.recipe.method, FixedFeatures) and",
        'return isinstance(agreed.recipe.method, FixedFeatures) and agreed.method != "fedcof" and',
        f"{CRAFTED}::test_sums_of_too_many_features_are_refused",
    ),
    "rare classes of validation samples are left out": (
        "methods/exact/blocks/fixed_features.py",
        "        return self.often_enough(part, client.classes, client.task)",
        "        return part if held_out else self.often_enough(part, client.classes, client.task)",
        "tests/methods/test_fedkrylov.py::test_sums_leave_out_classes_with_few_validation_samples",
    ),
    "models of a step are measured once": (
        f"{FLOWER}/silo/measuring.py",
        "    if first != digest:",
        "    if not first:",
        "tests/silos/across/test_attacks.py::test_models_of_a_step_are_measured_once",
    ),
    "measured steps are those of the plan": (
        f"{FLOWER}/silo/policy.py",
        "if ask.step not in steps:",
        "if ask.step < 0:",
        "tests/silos/across/test_attacks.py::test_a_plan_names_the_steps_after_which_models_are_measured",
    ),
    "counts have noise": (
        "clinic/noisy.py",
        "square = (self.noise * part.norm * GRID) ** 2",
        "square = (self.noise * part.norm) ** 2",
        "tests/clinic/test_noisy.py::test_membership_of_a_known_record_shows_no_more_than_epsilon",
    ),
    "what is measured is bounded": (
        f"{FLOWER}/silo/budget.py",
        "if found > limits.evaluation_epsilon * _SLACK:",
        "if found < 0:",
        "tests/silos/across/test_evaluating.py::test_what_is_measured_is_bounded_over_all_runs",
    ),
    "links in run folders": (
        "core/engine/folder.py",
        "        _refuse_links(path)\n",
        "",
        "tests/core/engine/test_folder.py::test_a_folder_with_a_link_is_not_gone_on_with",
    ),
    "messages at the SuperLink are private": (
        f"{FLOWER}/superlink.py",
        "        file.chmod(0o600)\n",
        "        pass\n",
        "tests/silos/test_superlink.py::test_only_its_user_reads_the_messages_at_the_superlink",
    ),
    "headers of images are looked at first": (
        "readers/raster.py",
        "if size[0] * size[1] > _MOST_PIXELS:",
        "if size[0] < 0:",
        "tests/readers/test_medical.py::test_a_header_that_says_more_pixels_than_any_memory_holds_is_refused",
    ),
    "nested files are one line": (
        "cli/app.py",
        "except RecursionError:",
        "except ZeroDivisionError:",
        "tests/cli/across/test_others_folders.py::test_what_is_nested_too_deeply_is_refused_in_one_line",
    ),
    "columns of a regression": (
        f"{FLOWER}/silo/policy.py",
        'if method.least is None and file.limits.level == "sums":',
        "if False:",
        f"{RECORDS}::test_a_regression_shows_no_record_that_differs_from_all_others",
    ),
    "masks are bound to what silos were sent": (
        f"{FLOWER}/trust/masking.py",
        "chosen = custody.digest(wire.chunks(about))",
        'chosen = ""',
        "tests/silos/across/test_same_values.py::test_a_coordinator_that_sends_the_others_a_dead_network_reads_no_model",
    ),
    "values that move are bounded": (
        "core/engine/drive.py",
        "if self._moved > EACH * self._most:",
        "if self._moved < 0:",
        "tests/silos/across/test_attacks.py::test_values_that_move_are_limited_like_tasks",
    ),
    "noise is shared only where a silo allows it": (
        f"{FLOWER}/silo/budget.py",
        "dp.honest > file.limits.honest",
        "dp.honest > 10**9",
        f"{PRIVATE}::test_noise_is_shared_only_where_a_silo_allows_it",
    ),
    "sums with noise are counted": (
        "core/engine/worker.py",
        "            privacy.note()\n",
        "            pass\n",
        f"{PRIVATE}::test_a_silo_gives_noisy_sums_once_and_the_same_again",
    ),
    "refused sums with noise cost nothing": (
        "core/training/private/task.py",
        "keeper.key(int(not centre), spent, note=False)",
        "keeper.key(int(not centre), spent)",
        f"{PRIVATE}::test_nobody_opens_a_sum_with_less_noise_than_was_promised",
    ),
    "samples are read for noisy sums only": (
        "core/training/private/task.py",
        "        if not self.released:\n",
        "        if False:\n",
        "tests/core/training/private/test_task.py::test_a_task_that_reads_samples_without_giving_noisy_sums_is_stopped",
    ),
    "groups of another size are unions of groups": (
        "methods/exact/trees.py",
        "if smaller >= min(least, _BASE):",
        "if smaller >= least:",
        "tests/methods/test_trees.py::test_groups_of_another_size_single_out_no_record",
    ),
    "room for sums does not depend on a record": (
        "methods/exact/trees.py",
        "if not (numbers.abs() < _FARTHEST).all():",
        "if not len(what):",
        "tests/methods/test_trees.py::test_whether_sums_have_room_does_not_tell_the_target_of_a_record",
    ),
    "rare features are left out": (
        "methods/exact/blocks/fixed_features.py",
        "return len(phi) - usual >= self.min_active",
        "return len(phi) - usual >= 0",
        f"{CRAFTED}::test_what_few_samples_show_is_left_out",
    ),
    "the log is bounded for each peer": (
        f"{FLOWER}/silo/participation.py",
        "if size > most:",
        "if size < 0:",
        f"{LOG}::test_nobody_pushes_out_what_others_did",
    ),
    "hellos are logged": (
        f"{FLOWER}/silo/silo.py",
        'self._note(f"hello',
        'str(f"hello',
        f"{LOG}::test_hellos_are_logged",
    ),
    "files are private": (
        f"{FLOWER}/supernode.py",
        "    os.umask(0o077)\n",
        "",
        f"{SUPERNODE}::test_only_its_user_reads_the_folder_of_a_silo",
    ),
    "a clock that jumps": (
        f"{FLOWER}/silo/shelf.py",
        "len(days[days.index(asked) :])",
        "time.time() // _DAY - asked",
        "tests/silos/test_silo.py::test_a_clock_that_jumps_removes_no_run",
    ),
    "a clock that was late": (
        f"{FLOWER}/silo/shelf.py",
        "len(days[days.index(asked) :])",
        "sum(day >= asked for day in days)",
        "tests/silos/test_silo.py::test_a_clock_that_was_late_at_the_last_request_removes_no_run",
    ),
    "all of the roster after a joining that broke off": (
        f"{FLOWER}/silo/silo_file.py",
        "if known and certificate.exists():",
        "if known:",
        "tests/silos/across/test_enrolment.py::"
        "test_a_silo_whose_first_joining_broke_off_knows_all_of_the_roster",
    ),
    "an address is that of the connection": (
        f"{FLOWER}/metrics.py",
        "proxy_headers=False",
        "proxy_headers=True",
        "tests/silos/test_status_page.py::test_a_header_does_not_say_from_where_somebody_asks",
    ),
    "targets are not columns": (
        "readers/moments.py",
        "{*self.missing} == columns",
        "{*self.missing} <= {*self.moments}",
        "tests/readers/test_moments.py::test_sums_that_no_rows_have_are_refused",
    ),
    "other code is named": (
        f"{FLOWER}/coordinator/session.py",
        "elif hello.version != code_version():",
        "elif hello.version == '':",
        "tests/silos/test_session.py::test_a_silo_of_another_commit_is_named_before_training",
    ),
    "control characters": (
        "cli/console.py",
        'text = visible(text, keep="\\n")',
        "pass",
        "tests/cli/across/test_others_folders.py::test_terminal_escapes_are_not_printed",
    ),
    "formulas": (
        "core/base/files.py",
        "if text.startswith((",
        "if text.endswith((",
        "tests/cli/across/test_others_folders.py::test_tables_hold_no_formulas",
    ),
    "regular files": (
        "core/base/files.py",
        "if not stat.S_ISREG(found.st_mode) or found.st_size > most:",
        "if found.st_size > most:",
        "tests/cli/across/test_others_folders.py::test_what_is_no_regular_file_does_not_hang",
    ),
    "no body before a signature": (
        f"{FLOWER}/superlink.py",
        'elif not await asyncio.to_thread(self._signed, dict(scope["headers"])):',
        "elif not scope:",
        "tests/silos/test_superlink.py::test_a_body_is_not_read_before_a_registered_silo_signed",
    ),
    "folders of others lead to no SuperLink": (
        "cli/coordinator.py",
        "if not outside.trusts_text(named):",
        "if not named:",
        "tests/silos/across/test_revised.py::test_a_folder_of_others_leads_to_no_superlink",
    ),
    "no core files": (
        f"{FLOWER}/supernode.py",
        "    leave_no_core()\n",
        "",
        f"{SUPERNODE}::test_a_silo_that_crashes_leaves_no_core_file",
    ),
    "the plan names its noise": (
        f"{FLOWER}/silo/approval.py",
        'for name in ("run", "recipe", "keys"):',
        'for name in ("run", "recipe", "keys", "dp"):',
        "tests/silos/test_approval.py::test_no_part_of_a_recipe_is_hidden_from_who_reads_the_plan",
    ),
    "silos send their own replies only": (
        f"{FLOWER}/superlink.py",
        "parties != (request.node.node_id, SUPERLINK_NODE_ID)\n"
        "                or not about.reply_to_message_id",
        "not parties",
        "tests/silos/test_superlink.py::test_a_silo_sends_nothing_but_its_own_replies",
    ),
    "an answer is for the ticket that was asked for": (
        f"{FLOWER}/server_app.py",
        "found[ticket] = (\n",
        "found[message.metadata.reply_to_message_id] = (\n",
        "tests/silos/test_server_app.py::test_an_answer_counts_for_what_was_asked_alone",
    ),
    "connections are bounded": (
        f"{FLOWER}/ports.py",
        "if crowd:",
        "if False:",
        "tests/silos/test_ports.py::test_connections_of_one_address_and_of_all_are_bounded",
    ),
}
HANGS = {"regular files"}
"""without the defence, the tests may wait for ever"""


@pytest.mark.parametrize("defence", DEFENCES)
def test_the_line_of_a_defence_and_its_tests_are_there(defence: str) -> None:
    """So that whoever moves one notices at once."""
    file, code, instead, tests = DEFENCES[defence]
    text = (ROOT / "src" / "ekiden" / file).read_text(encoding="utf-8")
    assert text.count(code) == 1, f"{file} has changed: name the line that is the defence now"
    assert instead != code
    for test in tests.split():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.slow
@pytest.mark.parametrize("defence", DEFENCES)
def test_a_test_notices_that_a_defence_is_gone(defence: str, tmp_path: Path) -> None:
    file, code, instead, tests = DEFENCES[defence]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "src" / "ekiden" / file
    path.write_text(path.read_text(encoding="utf-8").replace(code, instead), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        assert defence in HANGS
        return
    # A server that the test left waiting may also take the interpreter down at its end.
    assert done.returncode, done.stdout.decode()[-2000:]
    noticed = re.search(
        rb"\n(FAILED|ERROR) tests/\S+::", done.stdout
    )  # an error is one of what the test begins with
    assert noticed, done.stdout.decode()[-2000:]
