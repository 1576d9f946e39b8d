{{- define "kvwatch.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvwatch.selector" -}}
app.kubernetes.io/name: kvwatch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvwatch.labels" -}}
{{ include "kvwatch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvwatch.config" -}}
{{- $web := dict "listen_address" (list (printf ":%v" .Values.port)) -}}
{{- toYaml (mergeOverwrite (dict "web" $web) .Values.config) -}}
{{- end -}}
